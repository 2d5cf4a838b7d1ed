"""Failures and interrupts: files stay complete, finished runs are kept, and the exit status is not 0."""

from __future__ import annotations

import errno
import io
import json
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM
from misbehaving import Exchange, good, serving
from tokenspeed_bench import files, trace
from tokenspeed_bench.command import bench
from tokenspeed_bench.errors import INTERRUPTED, BenchError
from tokenspeed_bench.offline import NUM_FIRST

import tokenspeed_core

BEFORE = '{"an": "older result"}'
FIRST_REPEAT = NUM_FIRST + 1  # index of the first repeat among the engine's calls


def engine(monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Replace `LLM` by a fake engine."""
    monkeypatch.setitem(
        tokenspeed_core.__dict__, "LLM", lambda model=None, **settings: FakeLLM(**options)
    )


class Full(io.StringIO):
    """A standard output on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@contextmanager
def max_file_size(num_bytes: int) -> Iterator[None]:
    """Limit the size of every file, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_keeps_the_old_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x.json"
    path.write_text(BEFORE)
    with max_file_size(4096), pytest.raises(BenchError, match=r"x\.json: File too large"):
        files.write(str(path), "x" * 100_000)
    assert path.read_text() == BEFORE
    assert list(tmp_path.iterdir()) == [path]


def test_replaced_file_keeps_mode_and_link(
    tmp_path: Path,
) -> None:
    path, link = tmp_path / "x.json", tmp_path / "link.json"
    path.write_text(BEFORE)
    path.chmod(0o600)
    link.symlink_to(path)
    files.write(str(link), "new")
    assert (path.read_text(), path.stat().st_mode & 0o777, link.is_symlink()) == (
        "new",
        0o600,
        True,
    )
    files.check_writable("/dev/null")
    files.write("/dev/null", "new")
    assert not Path("/dev/null").is_file()


def test_full_disk_for_plot_keeps_the_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine(monkeypatch)
    path = tmp_path / "x.json"
    assert bench(["latency", "--repeats", "1", "--json", str(path), "--plot", "/dev/full"]) == 2
    assert "latency" in path.read_text()
    assert (
        capsys.readouterr().err
        == "... latency 1 of 1\ntokenspeed: /dev/full: No space left on device\n"
    )


def test_failed_profile_keeps_the_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(work: Any, path: str) -> None:
        raise BenchError("the disk is full")

    engine(monkeypatch)
    monkeypatch.setattr(trace, "record", fails)
    path = tmp_path / "x.json"
    words = [
        "all",
        "--traffic",
        "latency,throughput",
        "--profile",
        str(tmp_path / "p.json"),
        "--json",
        str(path),
    ]
    assert bench(words) == 1
    runs = json.loads(path.read_text())["runs"]
    assert [run["traffic"]["name"] for run in runs] == ["start", "latency", "throughput"]
    assert "latency has no profile: the disk is full" in capsys.readouterr().err


def test_lost_console_still_writes_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine(monkeypatch)
    path = tmp_path / "x.json"
    monkeypatch.setattr(sys, "stdout", Full())
    assert bench(["latency", "--json", str(path)]) == 1
    assert "latency" in path.read_text()
    printed = capsys.readouterr().err
    assert printed.count("tokenspeed:") == 1
    assert "cannot print the results (No space left on device)" in printed
    with pytest.raises(BenchError, match="the standard output: No space left on device"):
        bench(["latency"])
    assert bench(["latency", "--json", "-"]) == 2
    assert "the standard output: No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("exists", [True, False], ids=["a good file", "no file"])
def test_result_without_traffic_replaces_no_file(
    exists: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine(monkeypatch, max_len=1000)
    path, plot = tmp_path / "x.json", tmp_path / "x.svg"
    if exists:
        path.write_text(BEFORE)
    assert bench(["prefill", "--json", str(path), "--plot", str(plot)]) == 1
    printed = capsys.readouterr().err
    assert "prefill was left out: the context is 1000" in printed
    assert ("x.json: unchanged" in printed) == exists
    assert "x.svg: not drawn" in printed
    assert exists == (path.read_text() == BEFORE)
    assert not plot.exists()


def test_ctrl_c_before_first_repeat_exits_130(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine(monkeypatch, raise_at=FIRST_REPEAT)
    path, plot = tmp_path / "x.json", tmp_path / "x.svg"
    assert bench(["throughput", "--json", str(path), "--plot", str(plot)]) == INTERRUPTED
    assert json.loads(path.read_text())["is_interrupted"]
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_while_writing_loses_nothing(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(path: str, text: str) -> None:
        signal.raise_signal(number)
        original_write(path, text)

    original_write, path = files.write, tmp_path / "x.json"
    engine(monkeypatch)
    monkeypatch.setattr(files, "write", interrupted)
    assert bench(["latency", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["runs"][-1]["traffic"]["name"] == "latency"


def test_ctrl_c_during_engine_start_has_no_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def make(model: str | None = None) -> FakeLLM:
        raise KeyboardInterrupt

    monkeypatch.setitem(tokenspeed_core.__dict__, "LLM", make)
    assert bench(["throughput", "--json", str(tmp_path / "x.json")]) == INTERRUPTED


def test_unanswered_load_keeps_the_previous_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fails_later(exchange: Exchange) -> None:
        if exchange.number < NUM_FIRST + 2:
            return await good(exchange)
        return exchange.refuse("500 Oops", "the device is gone")

    path = tmp_path / "x.json"
    with serving(fails_later) as fake:
        words = ["--users", "1,2", "--requests", "2,4", "--no-client-cost", "--json", str(path)]
        assert bench(["serve", "--url", fake.url, *words]) == 1
    assert (
        "no request was answered: 500 Oops: the device is gone (4 times)" in capsys.readouterr().err
    )
    (_, load) = json.loads(path.read_text())["runs"]
    assert load["figures"]["answered"] == 2
