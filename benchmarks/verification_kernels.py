"""List the kernels of captured decode steps with and without draft tokens, in the order of a layer.

    python benchmarks/verification_kernels.py                      # qwen3-8b, one row, 0, 4 and 8 drafts, 60 seconds
    python benchmarks/verification_kernels.py --shape small --rows 2 --drafts 1

For each number of draft tokens it prints the step's time without the profiler, then each kernel of a layer and each
kernel outside of the layers. A kernel may start before the previous one has ended (PDL), so `added` is the time from
the latest end of the kernels before it to its own end, and `took` is its own duration; both are medians in µs. The
`added` times sum up to the time of the step, apart from the gaps between steps. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from runner_step import prefilled
from tokenspeed_bench.result import machine
from tokenspeed_bench.shapes import SHAPES, write
from tokenspeed_testing.explain import backends
from torch.profiler import ProfilerActivity, profile
from verification import SMALL, start, step_ms

STEPS = 20


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, a copy or a fill on the device. Times are in µs."""

    name: str
    took: float
    added: float


def launches(events: list[Any]) -> list[Launch]:
    """Return what ran on the device, in the order of its starts."""
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in events
        if "CUDA" in str(event.device_type)
    )
    found, latest = [], spans[0][0]
    for first, last, name in spans:
        found.append(Launch(name, last - first, max(0.0, last - latest)))
        latest = max(latest, last)
    return found


def cut(found: list[Launch], num_layers: int, num_steps: int) -> list[list[Launch]]:
    """Cut the launches before each launch of a kernel that every layer has once. Raises ValueError without one."""
    counts = collections.Counter(launch.name for launch in found)
    once = {name for name, count in counts.items() if count == num_layers * num_steps}
    if not once:
        raise ValueError(f"no kernel runs {num_layers * num_steps} times: {counts.most_common(20)}")
    first = max((launch for launch in found if launch.name in once), key=lambda one: one.took).name
    pieces: list[list[Launch]] = []
    for launch in found:
        if launch.name == first:
            pieces.append([])
        if pieces:
            pieces[-1].append(launch)
    return pieces


def show(title: str, pieces: list[list[Launch]]) -> None:
    """Print the medians of pieces with the same kernels."""
    medians = [
        (
            launch.name,
            statistics.median(piece[place].added for piece in pieces),
            statistics.median(piece[place].took for piece in pieces),
        )
        for place, launch in enumerate(pieces[0])
    ]
    print(f"  {title}: {sum(added for _, added, _ in medians):.1f} us", flush=True)
    for name, added, took in medians:
        print(f"    added {added:7.2f}  took {took:7.2f}  {name[:90]}", flush=True)


def report(found: list[Launch], num_layers: int, num_steps: int) -> None:
    """Print the kernels of a layer, and those from the last layer of a step to the first of the next."""
    pieces = cut(found, num_layers, num_steps)
    kinds = collections.defaultdict(list)
    for piece in pieces:
        kinds[tuple(launch.name for launch in piece)].append(piece)
    (_, layer), *others = sorted(kinds.items(), key=lambda kind: -len(kind[1]))
    show(f"a layer ({len(layer)} times)", layer)
    for _, other in others[:1]:
        show(f"between the layers of two steps ({len(other)} times)", other)


def main() -> None:
    """Time and trace the steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-8b", help=f"small, {', '.join(SHAPES)}")
    parser.add_argument("--rows", type=int, default=1, help="number of sequences")
    parser.add_argument(
        "--drafts", type=int, nargs="+", default=[0, 4, 8], help="draft tokens per row"
    )
    parser.add_argument(
        "--context", type=int, default=1024, help="tokens per sequence at the start"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device, and torch finds none")
    begin = time.perf_counter()
    SHAPES["small"] = {**SHAPES["qwen3-8b"], **SMALL}
    print(json.dumps(machine()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = write(options.shape, Path(folder))
        max_steps = 2 * (STEPS + 5) * len(options.drafts)
        runner = start(path, [options.rows], options.context, max_steps)
        print(json.dumps(backends(runner.kernel_plan)), flush=True)
        maker, names = prefilled(runner, options.rows, options.context, 0.0)
        # Tracing slows all launches after it, so all times come first.
        times = {}
        for num_drafts in options.drafts:
            step_ms(runner, maker, names, num_drafts, 5)
            times[num_drafts] = step_ms(runner, maker, names, num_drafts, STEPS)
        num_layers = SHAPES[options.shape]["num_hidden_layers"]
        for num_drafts in options.drafts:
            step_ms(runner, maker, names, num_drafts, 3)
            with profile(activities=[ProfilerActivity.CUDA]) as trace:
                step_ms(runner, maker, names, num_drafts, STEPS)
            print(f"{num_drafts} drafts: {1e3 * times[num_drafts]:.0f} us per step", flush=True)
            report(launches(trace.events()), num_layers, STEPS)
        runner.close()
    print(json.dumps({"seconds": round(time.perf_counter() - begin, 1)}))


if __name__ == "__main__":
    main()
