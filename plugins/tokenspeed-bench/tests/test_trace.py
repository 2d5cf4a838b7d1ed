"""Timelines read from traces of known events."""

from __future__ import annotations

from typing import Any

import pytest
from tokenspeed_bench.errors import BenchError
from tokenspeed_bench.trace import OUR_TRACK, _track, named, read


def kernel(name: str, begin: float, length: float, launch: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "ts": begin,
        "dur": length,
        "args": {"correlation": launch},
    }


EVENTS = [
    {"ph": "M", "name": "process_name", "pid": 1},
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 1000.0},
    kernel("gemm", 100.0, 50.0, 1),
    kernel("norm", 155.0, 10.0, 1),  # 5 idle inside a launch
    kernel("copy", 160.0, 2.0, 2),  # under the norm
    kernel("gemm", 265.0, 35.0, 3),  # 100 idle between launches
]


def test_busy_share_and_gaps_of_known_kernels() -> None:
    timeline = read(EVENTS)
    assert timeline.where == "device"
    assert timeline.span == 200.0
    assert timeline.busy == 95.0
    assert (timeline.num_works, timeline.num_launches) == (4, 3)
    assert timeline.inside == 5.0
    assert [(begin, length, before, after) for begin, length, before, after in timeline.gaps] == [
        (50.0, 5.0, "gemm", "norm"),
        (65.0, 100.0, "norm", "gemm"),
    ]
    text = timeline.text()
    assert "busy 47.5 % of 0.20 ms, 4 kernels in 3 launches" in text
    assert timeline.between == [100.0]
    assert "0.01 inside launches, 0.10 in 1 gaps between them, median 100.0 µs" in text
    assert text.index("100.0 µs") < text.index("5.0 µs"), "the longest gap is named first"


def test_cpu_trace_uses_operators() -> None:
    timeline = read([event for event in EVENTS if event.get("cat") != "kernel"])
    assert timeline.where == "operators on the CPU"
    assert timeline.busy == timeline.span == 1000.0


def test_track_shows_launches_and_gaps() -> None:
    bars = [event for event in _track(EVENTS, read(EVENTS)) if event["ph"] == "X"]
    assert all(bar["pid"] == OUR_TRACK for bar in bars)
    assert [(bar["tid"], bar["ts"], bar["dur"]) for bar in bars] == [
        (0, 100.0, 65.0),
        (0, 160.0, 2.0),
        (0, 265.0, 35.0),
        (1, 150.0, 5.0),
        (1, 165.0, 100.0),
    ]


def test_trace_files_are_named_by_traffic() -> None:
    assert named("/x/trace.json", "latency") == "/x/trace-latency.json"


def test_a_trace_without_work_is_refused() -> None:
    with pytest.raises(BenchError, match="empty"):
        read([])
