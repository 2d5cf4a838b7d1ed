"""Profiles of a server: the recorder in the engine process, and the orders that start it."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from misbehaving import Exchange, good, serving
from tokenspeed_bench import profiled
from tokenspeed_bench.client import LoadOptions, run
from tokenspeed_bench.connection import Target
from tokenspeed_bench.errors import BenchError
from tokenspeed_bench.online import Load
from tokenspeed_bench.options import loads_of, parse
from tokenspeed_bench.profiled import Profile, check_recorder, take, window
from tokenspeed_bench.recorder import VARIABLE, Order, Recorder
from tokenspeed_bench.trace import OUR_TRACK, finished
from tokenspeed_bench.traffic import load

from tokenspeed_core.api import StepRecord
from tokenspeed_core.plugins import Catalog, Selection
from tokenspeed_core.plugins.hooks import Hooks

HOOKS = "tokenspeed_bench.hooks"
LOADS = [
    Load(load(8, 16, 64, True), LoadOptions(4, None, 1)),
    Load(load(1, 16, 8, True), LoadOptions(1, None, 1)),
]


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hooks]:
    """Yield the hooks of a process that starts without our variable, without third-party hooks."""
    monkeypatch.delenv(VARIABLE, raising=False)
    yield loaded()
    sys.modules.pop(HOOKS, None)


def loaded() -> Hooks:
    """Return the hooks of a process that starts now."""
    sys.modules.pop(HOOKS, None)
    return Hooks.load(Catalog.discover(Selection(frozenset())))


def steps(recorder: Recorder, num: int, first: int = 0) -> None:
    """Report `num` steps to the recorder, as an engine does."""
    torch = pytest.importorskip("torch")
    for i in range(first, first + num):
        torch.ones(4) + 1
        recorder.observe(
            StepRecord(step_id=i, num_rows=2, num_decodes=1, num_tokens=9, duration=0.01)
        )


def test_hook_exists_only_with_the_variable(
    hooks: Hooks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert hooks.observer("observe_step") is None
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert loaded().observer("observe_step") is not None


def test_recorder_skips_then_names_steps(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    recorder, order = Recorder(tmp_path), Order("trace.json", 3, 4)
    steps(recorder, 5)
    assert list(tmp_path.iterdir()) == []
    order.put(tmp_path)
    assert not order.is_taken(tmp_path)
    steps(recorder, 1 + 3 + 3, first=5)
    assert order.is_taken(tmp_path)
    assert not order.is_answered(tmp_path)
    steps(recorder, 20, first=12)
    path = tmp_path / "mine.json"
    assert finished(order.trace(tmp_path), str(path)).num_works >= 4
    events = json.loads(path.read_text())["traceEvents"]
    assert any(event["pid"] == OUR_TRACK for event in events)
    named = [
        event["name"]
        for event in sorted(events, key=lambda event: event.get("ts", 0))
        if "rows" in event["name"]
    ]
    assert named == [f"step {i}: rows 2, decodes 1, tokens 9" for i in range(9, 13)]
    assert {each.name for each in tmp_path.iterdir()} == {"trace.json", "mine.json"}


def test_new_order_ends_the_previous_recording(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    recorder, first, second = (
        Recorder(tmp_path),
        Order("first.json", 1, 50),
        Order("second.json", 1, 2),
    )
    first.put(tmp_path)
    steps(recorder, 10)
    second.put(tmp_path)
    steps(recorder, 10, first=10)
    assert second.is_answered(tmp_path)
    assert not first.is_answered(tmp_path)


def test_recorder_error_does_not_stop_the_engine(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    recorder, order = Recorder(tmp_path), Order("trace.json", 1, 2)
    order.trace(tmp_path).mkdir()
    order.put(tmp_path)
    steps(recorder, 10)
    assert "Is a directory" in order.failure(tmp_path).read_text()


def test_truncated_trace_is_reported(tmp_path: Path) -> None:
    part = tmp_path / "part.json"
    part.write_text('{"traceEvents": [{"ph": "X", "na')
    with pytest.raises(BenchError, match=r"x\.json: torch could not write its trace"):
        finished(part, str(tmp_path / "x.json"))
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--users", "1", "--requests", "16", "--output-len", "128"), (256, 64)),
        (("--users", "256", "--requests", "256", "--output-len", "128"), (32, 64)),
        (("--users", "8", "--requests", "8", "--output-len", "16"), (4, 8)),
        (("--request-rate", "5", "--requests", "80", "--output-len", "16"), (4, 8)),
        (("--traffic", "prefill"), (1, 1)),
    ],
)
def test_short_load_has_a_smaller_window(words: tuple[str, ...], expected: tuple[int, int]) -> None:
    fixed = [] if "--traffic" in words else ["--fixed"]
    (one,) = loads_of(parse("serve", [*words, *fixed])[0])
    assert window(one) == expected


def test_files_of_several_loads_are_numbered() -> None:
    assert [(name, path) for name, path, _ in Profile(LOADS, "/x/t.json", 1.0).each()] == [
        ("load, 4 users", "/x/t-1-users-4.json"),
        ("load, 1 user", "/x/t-2-users-1.json"),
    ]
    assert [path for _, path, _ in Profile(LOADS[:1], "/x/t.json", 1.0).each()] == ["/x/t.json"]


def entry(**more: str) -> dict[str, str]:
    return {
        "distribution": "tokenspeed-bench",
        "kind": "hooks",
        "status": "ok",
        "reason": "",
        **more,
    }


@pytest.mark.parametrize(
    ("plugins", "message"),
    [
        (None, "hooks of tokenspeed-bench"),
        ([entry(kind="commands")], "pip install --force-reinstall --no-deps tokenspeed-bench"),
        (
            [entry(status="disabled", reason="left out by X")],
            "which record the profile, are disabled: left out by X",
        ),
    ],
)
def test_server_without_recorder_is_refused(plugins: Any, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        check_recorder(plugins)
    check_recorder([entry(kind="commands"), entry()])


def test_load_ends_when_enough_is_recorded() -> None:
    async def slow(exchange: Exchange) -> None:
        if exchange.number < 2:
            return await good(exchange)
        return await asyncio.sleep(60)

    with serving(slow) as fake:
        answers = run(
            Target(fake.url, "m"),
            load(8, 10, 4, is_fixed=True).sessions,
            LoadOptions(1, None, 1),
            is_enough=lambda: len(fake.exchanges) > 2,
        )
    assert (len(answers.records), answers.failures, answers.is_interrupted) == (2, [], False)


def test_failed_server_start_is_reported(tmp_path: Path) -> None:
    (problem,) = take(
        ["--max-num-sex", "3"],
        None,
        Profile(LOADS, str(tmp_path / "x.json"), 1.0),
        lambda *given: None,
    )
    assert problem.startswith("no profile: the server ended with status 2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("answer", "failure", "message"),
    [
        (good, None, "recorder of tokenspeed-bench"),
        (good, "", "free disk space"),
        (good, "RuntimeError: no counters", "RuntimeError: no counters"),
        ("refuses", None, "the load failed: 500 Oops: the device is gone"),
    ],
)
def test_missing_trace_is_explained(
    answer: Any, failure: str | None, message: str, tmp_path: Path
) -> None:
    async def refuses(exchange: Exchange) -> None:
        exchange.refuse("500 Oops", "the device is gone")

    if failure is not None:
        (tmp_path / "x.json.failure").write_text(failure)
    with (
        serving(refuses if answer == "refuses" else answer) as fake,
        pytest.raises(BenchError, match=message),
    ):
        profiled._record(Target(fake.url, "m", salt="s"), LOADS[1], "load", "/y/x.json", tmp_path)


def test_too_short_load_is_reported(tmp_path: Path) -> None:
    def take_order() -> None:
        while not (tmp_path / "order.json").exists():
            pass
        (tmp_path / "order.json").unlink()

    taker = threading.Thread(target=take_order)
    taker.start()
    with (
        serving(good) as fake,
        pytest.raises(BenchError, match="fewer than 7 steps"),
    ):
        profiled._record(Target(fake.url, "m", salt="s"), LOADS[1], "load", "/y/x.json", tmp_path)
    taker.join()
