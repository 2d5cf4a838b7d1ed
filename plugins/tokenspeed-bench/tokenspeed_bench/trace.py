"""A timeline of the device, recorded with PyTorch's profiler, and the gaps in it.

The trace has Chrome's format (chrome://tracing, ui.perfetto.dev), with an additional track of
launches (a CUDA graph or a single kernel) and gaps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenspeed_bench.errors import BenchError
from tokenspeed_bench.files import write
from tokenspeed_bench.metrics import percentile
from tokenspeed_bench.recorder import STEPS, activities

ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
ON_CPU = frozenset({"cpu_op"})
DEVICE = "device"
OUR_TRACK = 1_000_000  # a process id that no process has
NUM_GAPS = 10  # that are shown


@dataclass(frozen=True, slots=True)
class Busy:
    """An interval of device work in microseconds. `launch` identifies the host call."""

    begin: float
    end: float
    name: str
    launch: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Device activity in a trace, or CPU operators without a device."""

    where: str
    span: float
    busy: float
    num_works: int
    num_launches: int
    gaps: Sequence[tuple[float, float, str, str]]  # begin, length, event before and event after
    inside: float  # sum of the gaps between kernels of the same launch
    between: Sequence[float]  # each of the other gaps

    def text(self) -> str:
        """Return the timeline as text."""
        idle = self.span - self.busy
        is_device = self.where == DEVICE
        launches = f" in {self.num_launches:,} launches" if is_device else ""
        lines = [
            f"  {self.where}: busy {100 * self.busy / self.span:.1f} % of {self.span / 1e3:.2f} ms, "
            f"{self.num_works:,} {'kernels' if is_device else 'operators'}{launches}",
            f"  idle {idle / 1e3:.2f} ms"
            + (
                f": {self.inside / 1e3:.2f} inside launches, {sum(self.between) / 1e3:.2f} in "
                f"{len(self.between):,} gaps between them{_middle(self.between)}"
                if is_device
                else ""
            ),
        ]
        longest = sorted(self.gaps, key=lambda gap: -gap[1])[:NUM_GAPS]
        return "\n".join(
            lines
            + [
                f"  gap of {length:8.1f} µs at {begin / 1e3:9.3f} ms, after {before[:44]}, before {after[:44]}"
                for begin, length, before, after in longest
            ]
        )


def _middle(gaps: Sequence[float]) -> str:
    return f", median {percentile(sorted(gaps), 50):.1f} µs" if gaps else ""


def named(path: str, name: str) -> str:
    """Return a path with a name before its suffix: `trace.json` and "latency" give `trace-latency.json`."""
    return str(Path(path).with_stem(f"{Path(path).stem}-{name}"))


def record(work: Callable[[], object], path: str) -> Timeline:
    """Run a function under the profiler, write its trace, and return the timeline.

    Raises BenchError if torch is missing, the trace is empty, or it cannot be written.
    """
    try:
        from torch.profiler import profile
    except ImportError as error:
        raise BenchError(
            "--profile needs torch: pip install 'tokenspeed-bench[profile]'"
        ) from error
    with profile(activities=activities()) as profiler:
        work()
    with folder_next_to(path) as folder:
        exported = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(exported))
        return finished(exported, path)


def folder_next_to(path: str) -> TemporaryDirectory[str]:
    """Return a temporary folder next to a file. Raises BenchError."""
    try:
        return TemporaryDirectory(prefix=".trace-", dir=Path(path).absolute().parent)
    except OSError as error:
        raise BenchError(
            f"{path}: cannot create a directory next to it: {error.strerror}"
        ) from error


def finished(exported: Path, path: str) -> Timeline:
    """Write an exported trace with step names and our track; return the timeline.

    Raises BenchError if the trace is empty, incomplete, or cannot be written.
    """
    try:
        data = json.loads(exported.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # torch raises nothing when the disk is full
        raise BenchError(
            f"{path}: torch could not write its trace; check the free disk space"
        ) from error
    names = data.get(STEPS, {})
    for event in data["traceEvents"]:
        if event.get("name") in names:
            event["name"] = names[event["name"]]
    timeline = read(data["traceEvents"])
    data["traceEvents"] += _track(data["traceEvents"], timeline)
    write(path, json.dumps(data))
    return timeline


def read(events: Sequence[Mapping[str, Any]]) -> Timeline:
    """Return the timeline of a trace's events. Raises BenchError if they contain no work."""
    kinds, where = ON_DEVICE, DEVICE
    if not any(event.get("cat") in ON_DEVICE for event in events):
        kinds, where = ON_CPU, "operators on the CPU"
    works = sorted(_works(events, kinds), key=lambda work: work.begin)
    if not works:
        raise BenchError("the trace is empty: nothing ran under the profiler")
    start, end, busy, inside = works[0].begin, works[0].begin, 0.0, 0.0
    last = works[0]
    gaps: list[tuple[float, float, str, str]] = []
    between: list[float] = []
    for work in works:
        if work.begin > end:
            if work.launch == last.launch:
                inside += work.begin - end
            else:
                between.append(work.begin - end)
            gaps.append((end - start, work.begin - end, last.name, work.name))
        if work.end > end:
            busy += work.end - max(end, work.begin)
            end, last = work.end, work
    num_launches = len({work.launch for work in works})
    return Timeline(
        where, max(end - start, 1e-9), busy, len(works), num_launches, gaps, inside, between
    )


def _works(events: Sequence[Mapping[str, Any]], kinds: frozenset[str]) -> Iterator[Busy]:
    for i, event in enumerate(events):
        if event.get("ph") == "X" and event.get("cat") in kinds:
            begin = float(event["ts"])
            launch = event.get("args", {}).get("correlation", -1 - i)
            yield Busy(begin, begin + float(event["dur"]), str(event["name"]), int(launch))


def _track(events: Sequence[Mapping[str, Any]], timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield the events of a track with a bar for each launch and each gap."""
    kinds = ON_DEVICE if timeline.where == DEVICE else ON_CPU
    works = list(_works(events, kinds))
    start = min(work.begin for work in works)
    yield {
        "ph": "M",
        "name": "process_name",
        "pid": OUR_TRACK,
        "args": {"name": "TokenSpeed: launches and gaps"},
    }
    for thread, name in ((0, "launches"), (1, "gaps")):
        yield {
            "ph": "M",
            "name": "thread_name",
            "pid": OUR_TRACK,
            "tid": thread,
            "args": {"name": name},
        }
    launches: dict[int, list[Busy]] = {}
    for work in works:
        launches.setdefault(work.launch, []).append(work)
    for number, parts in enumerate(launches.values() if kinds is ON_DEVICE else ()):
        begin, end = min(part.begin for part in parts), max(part.end for part in parts)
        yield _bar(0, f"launch {number}: {len(parts)} kernels", begin, end - begin)
    for at, length, before, after in timeline.gaps:
        yield _bar(1, f"{length:.1f} µs", start + at, length, after=after, before=before)


def _bar(thread: int, name: str, begin: float, length: float, **more: str) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "tokenspeed",
        "name": name,
        "pid": OUR_TRACK,
        "tid": thread,
        "ts": begin,
        "dur": length,
        "args": more,
    }
