"""Run the seeded workloads through `LLM` on dummy weights; print one JSON line for each, for scripts.

    python benchmarks/offline.py SHAPE [--workloads latency,throughput,prefill,agentic] [--repeats 3] [--flags JSON]

People use `tokenspeed bench all --shape SHAPE`, which this calls.
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
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("shape")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--flags", type=json.loads, default={}, help="more keywords for LLM, as JSON"
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
