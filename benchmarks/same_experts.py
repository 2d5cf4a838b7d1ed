"""Run the seeded workloads on dummy weights whose routers give all experts the same score.

    python benchmarks/same_experts.py [SHAPE] [--workloads throughput,prefill,agentic] [--repeats 2] [--flags JSON]

All tokens then choose the first experts. `benchmarks/offline.py` runs the same traffic with random
routers, which spread tokens evenly over all experts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenspeed_bench import result as results
from tokenspeed_bench.offline import Offline, measure
from tokenspeed_bench.shapes import write
from tokenspeed_bench.traffic import of_workload

from tokenspeed_core import LLM
from tokenspeed_models.loading import dummy
from tokenspeed_models.weights import WeightSlot

_random_fill = dummy._fill


def _fill(slot: WeightSlot, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    if slot.name.endswith(".gate.weight"):
        return slot.target.new_zeros(shape)
    return _random_fill(slot, shape, generator)


def main() -> None:
    """Run the workloads, and print one JSON line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "shape", nargs="?", default="deepseek-v2-lite", help="shape of `tokenspeed bench`"
    )
    parser.add_argument(
        "--workloads", default="throughput,prefill,agentic", help="workloads to run"
    )
    parser.add_argument(
        "--repeats", type=int, default=2, help="number of runs; the best one counts"
    )
    parser.add_argument(
        "--flags", type=json.loads, default={}, help="more keyword arguments of LLM, as JSON"
    )
    options = parser.parse_args()
    dummy._fill = _fill
    result = results.new("offline", options.shape, options.shape, options.flags)

    def report(run: dict[str, Any]) -> None:
        facts = {
            "shape": options.shape,
            "routers": "equal scores",
            "flags": options.flags,
            "platform": result["device"],
        }
        print(
            json.dumps({"workload": run["traffic"]["name"], **run["figures"], **facts}), flush=True
        )

    with tempfile.TemporaryDirectory() as folder:
        path = write(options.shape, Path(folder))
        workloads = [of_workload(name) for name in options.workloads.split(",")]
        for refused in measure(
            lambda: LLM(str(path), load_format="dummy", **options.flags),
            Offline(workloads, options.repeats),
            result,
            report,
        ):
            raise SystemExit(refused)


if __name__ == "__main__":
    main()
