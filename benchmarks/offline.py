"""Run the seeded workloads through `LLM` on dummy weights, and print one JSON line for each.

    python benchmarks/offline.py SHAPE [--workloads latency,throughput,prefill,agentic] [--repeats 3] [--flags JSON]

This is for scripts. `tokenspeed bench all --shape SHAPE` runs the same measurement for people.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from tokenspeed_bench import result as results
from tokenspeed_bench.offline import Offline, measure
from tokenspeed_bench.shapes import write
from tokenspeed_bench.traffic import WORKLOADS, of_workload

from tokenspeed_core import LLM


def main() -> None:
    """Run the workloads."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", help="shape of `tokenspeed bench`, such as qwen3-8b")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="workloads to run")
    parser.add_argument(
        "--repeats", type=int, default=3, help="number of runs; the best one counts"
    )
    parser.add_argument(
        "--flags", type=json.loads, default={}, help="more keyword arguments of LLM, as JSON"
    )
    options = parser.parse_args()
    result = results.new("offline", options.shape, options.shape, options.flags)

    def report(run: dict[str, Any]) -> None:
        facts = {
            "shape": options.shape,
            "flags": options.flags,
            "platform": result["device"],
            "python": result["versions"]["python"],
            "backends": result["backends"],
        }
        more = {name: value for name, value in run.items() if name not in ("traffic", "figures")}
        print(
            json.dumps({"workload": run["traffic"]["name"], **run["figures"], **more, **facts}),
            flush=True,
        )

    with tempfile.TemporaryDirectory() as folder:
        path = write(options.shape, Path(folder))
        plan = Offline(
            [of_workload(name) for name in options.workloads.split(",")], options.repeats
        )
        for refused in measure(
            lambda: LLM(str(path), load_format="dummy", **options.flags), plan, result, report
        ):
            raise SystemExit(refused)


if __name__ == "__main__":
    main()
