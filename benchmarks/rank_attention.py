r"""Rank attention backends by end-to-end times of a model, and write the ranking that `auto` uses.

    for pair in '"triton"' '"fa3"' '{"prefill": "fa3", "decode": "triton"}'; do
        python benchmarks/offline.py qwen3-8b --repeats 2 --flags "{\"attention_backend\": $pair}"
    done > runs.jsonl
    python benchmarks/rank_attention.py runs.jsonl --capability 9.0 --out tokenspeed_kernels/rankings.py

Prefill is ranked by the workloads "prefill", "throughput" and "agentic", decode by "latency", "throughput" and
"agentic", among runs that differ only in that phase's backend. Kernel times alone (attention_backends.py) do not
decide, because they ignore the mix of steps in serving and backends that synchronize with the device. A phase that the
runs rank is replaced with the backends of these runs; other rankings stay. rank_kernels.py ranks other ops.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

from ranking_file import source, update

from tokenspeed_core.api import Ranking

DECIDES = {
    "prefill": ("prefill", "throughput", "agentic"),
    "decode": ("latency", "throughput", "agentic"),
}


@dataclass(frozen=True, slots=True)
class Run:
    """A workload with a pair of backends; `seconds` is the best repeat."""

    where: str  # shape and device
    workload: str
    backends: Mapping[str, str]
    seconds: float


def main() -> None:
    """Read runs, rank, and write the ranking."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs",
        type=Path,
        help="output of offline.py with several pairs of backends on one device",
    )
    parser.add_argument(
        "--capability", required=True, help="compute capability of the device, such as 9.0"
    )
    parser.add_argument("--out", type=Path, help="update the rankings in this file")
    arguments = parser.parse_args()
    runs = list(read(arguments.runs.read_text().splitlines()))
    major, minor = map(int, arguments.capability.split("."))
    rankings = [
        Ranking("attention", phase, (major, minor), figures)
        for phase in DECIDES
        if (figures := ranked(runs, phase))
    ]
    print("".join(map(source, rankings)), end="")
    if arguments.out:
        update(arguments.out, rankings)


def read(lines: Iterable[str]) -> Iterable[Run]:
    """Yield the runs in JSON lines, except starts."""
    for data in map(json.loads, lines):
        if data["workload"] != "start":
            # A single name means the same backend for both phases.
            prefill, *decode = data["backends"]["attention"]
            backends = {"prefill": prefill, "decode": decode[0] if decode else prefill}
            yield Run(
                f"{data['shape']} on {data['platform']}",
                data["workload"],
                backends,
                float(data["s"]),
            )


def ranked(runs: Iterable[Run], phase: str) -> tuple[tuple[str, str], ...]:
    """Return (backend, its times as text) for a phase, ranked by the mean ratio to the best time."""
    best: dict[tuple[str, str, str], dict[str, float]] = defaultdict(dict)
    for run in runs:
        if run.workload in DECIDES[phase]:
            other = run.backends["decode" if phase == "prefill" else "prefill"]
            times = best[run.where, run.workload, other]
            backend = run.backends[phase]
            times[backend] = min(run.seconds, times.get(backend, run.seconds))
    ratios: dict[str, list[float]] = defaultdict(list)
    figures: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for (where, workload, _), times in sorted(best.items()):
        for backend, seconds in times.items() if len(times) > 1 else ():
            ratios[backend].append(seconds / min(times.values()))
            figures[backend][where].append(f"{workload} {seconds:.2f} s")
    order = sorted(ratios, key=lambda backend: geometric_mean(ratios[backend]))
    return tuple(
        (name, "; ".join(f"{where}: {', '.join(each)}" for where, each in figures[name].items()))
        for name in order
    )


if __name__ == "__main__":
    main()
