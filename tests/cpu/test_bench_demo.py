"""`tokenspeed bench` on the bundled demo, in process and through a server of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.slow

BENCH = (sys.executable, "-P", "-m", "tokenspeed_core.cli", "bench")
SMALL = ("--device", "cpu", "--kv-cache-memory", "64MiB")
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def _nothing_outlives_a_test() -> Iterator[None]:
    """End what a test that failed left: a load that goes on takes a core from all tests after it."""
    yield
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()


def bench(folder: Path, *words: str) -> tuple[dict[str, Any], str]:
    path = folder / "result.json"
    done = subprocess.run(
        [*BENCH, *words, *SMALL, "--json", str(path)],
        capture_output=True,
        text=True,
        timeout=200,
        env=ENVIRON,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text()), done.stdout


@pytest.mark.release
@pytest.mark.parametrize(
    "words",
    [
        ("prefill", "--requests", "2", "--input-len", "2048"),
        ("agentic", "--shared-len", "1024", "--turn-len", "64", "--turns", "2", "--sessions", "2"),
        ("agents", "--first-len", "1024", "--turn-len", "64", "--turns", "2", "--sessions", "2"),
    ],
    ids=lambda words: words[0],
)
def test_demo_runs_long_workloads_only_if_shortened(words: tuple[str, ...]) -> None:
    refused = subprocess.run(
        [*BENCH, words[0], *SMALL],
        capture_output=True,
        text=True,
        timeout=200,
        env=ENVIRON,
        check=False,
    )
    assert (refused.returncode, f"{words[0]} was left out" in refused.stderr) == (1, True)
    taken = subprocess.run(
        [*BENCH, *words, "--repeats", "1", "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=200,
        env=ENVIRON,
        check=False,
    )
    assert taken.returncode == 0, taken.stderr


def test_agentic_turns_hit_the_cache_in_every_repeat(
    tmp_path: Path,
) -> None:
    result, said = bench(
        tmp_path,
        "agentic",
        "--sessions",
        "3",
        "--turns",
        "3",
        "--shared-len",
        "160",
        "--turn-len",
        "32",
        "--output-len",
        "8",
        "--repeats",
        "2",
        "--plot",
        str(tmp_path / "x.svg"),
    )
    start, run = result["runs"]
    figures = run["figures"]
    assert figures["output_tokens"] == 3 * 3 * 8
    assert figures["prompt_tokens"] == 3 * (3 * 192 + (1 + 2) * 40)
    assert 0.5 < figures["cached_tokens"] / figures["prompt_tokens"] < 0.95
    assert start["figures"]["first_request_ms"] > 0
    assert {op["family"] for op in result["kernel_plan"]["ops"]} == set(result["backends"])
    assert "from the cache" in said
    assert (tmp_path / "x.svg").read_text().startswith("<svg")


def test_profile_is_a_chrome_trace_with_our_track(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    _, said = bench(
        tmp_path, "latency", "--output-len", "4", "--repeats", "1", "--profile", str(path)
    )
    names = {
        event.get("args", {}).get("name") for event in json.loads(path.read_text())["traceEvents"]
    }
    assert "TokenSpeed: launches and gaps" in names
    assert "busy" in said


@pytest.mark.release
def test_profile_on_a_full_disk_keeps_the_results(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    done = subprocess.run(
        [
            "bash",
            "-c",
            'ulimit -f 100; exec "$@"',
            "bash",
            *BENCH,
            "latency",
            "--output-len",
            "4",
            "--repeats",
            "1",
            *SMALL,
            "--profile",
            str(tmp_path / "trace.json"),
            "--json",
            str(path),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        env=ENVIRON,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "torch could not write its trace; is there room on the disk?" in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads(path.read_text())["runs"][-1]["traffic"]["name"] == "latency"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_before_the_first_repeat_exits_with_130(
    number: signal.Signals, tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    child = subprocess.Popen(
        [
            *BENCH,
            "throughput",
            "--requests",
            "64",
            "--output-len",
            "3000",
            *SMALL,
            "--json",
            str(path),
            "--plot",
            str(tmp_path / "x.svg"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRON,
    )
    assert child.stdout is not None
    while "median of the next" not in child.stdout.readline():
        assert child.poll() is None
    time.sleep(1)
    child.send_signal(number)
    _, said = child.communicate(timeout=120)
    assert child.returncode == 130, said
    assert "interrupted" in said
    assert json.loads(path.read_text())["is_interrupted"]


def test_server_is_started_measured_and_stopped(tmp_path: Path) -> None:
    result, said = bench(
        tmp_path,
        "serve",
        "--users",
        "1,4",
        "--requests",
        "3,8",
        "--input-len",
        "48",
        "--output-len",
        "16",
        "--fixed",
        "--api-key",
        "secret",
        "--no-client-cost",
        "--served-model-name",
        str(tmp_path),
    )
    start, first, one, four = result["runs"]
    assert start["traffic"]["name"] == "start"
    assert first["figures"]["first_over_median"] > 0
    assert (one["figures"]["answered"], four["figures"]["answered"]) == (3, 8)
    assert four["figures"]["output_tokens"] == 8 * 16
    assert four["figures"]["cached_tokens"] == 0, "a load starts from an empty prefix cache"
    assert result["kernel_plan"]["platform"].startswith("CPU")
    assert "secret" not in json.dumps(result)
    assert "8 answered, 0 failed" in said
    assert named(tmp_path) == []


@pytest.mark.release
def test_server_profile_contains_its_steps(
    tmp_path: Path,
) -> None:
    path = tmp_path / "result.json"
    done = subprocess.run(
        [
            *BENCH,
            "serve",
            "--users",
            "1,4",
            "--requests",
            "1,8",
            "--input-len",
            "16",
            "--output-len",
            "1,24",
            "--fixed",
            "--no-client-cost",
            *SMALL,
            "--json",
            str(path),
            "--profile",
            str(tmp_path / "trace.json"),
            "--served-model-name",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        env=ENVIRON,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "load, 1 user: no profile: the load was over in fewer than 3 steps" in done.stderr
    assert "Traceback" not in done.stderr
    result = json.loads(path.read_text())
    assert [run["traffic"]["name"] for run in result["runs"]] == ["start", "first", "load", "load"]
    trace = tmp_path / "trace-2-users-4.json"
    assert f"profile of load, 4 users: {trace}\n  operators on the CPU: busy" in done.stdout
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(str(event["name"]).startswith("step ") for event in events) == 24
    assert "TokenSpeed: launches and gaps" in {
        event.get("args", {}).get("name") for event in events
    }
    assert set(tmp_path.iterdir()) == {path, trace}
    assert named(tmp_path) == []


@pytest.mark.release
def test_server_without_a_recorder_has_no_profile(tmp_path: Path) -> None:
    path, left_out = tmp_path / "result.json", "-tokenspeed-bench:hooks"
    done = subprocess.run(
        [
            *BENCH,
            "serve",
            "--users",
            "1",
            "--requests",
            "2",
            "--output-len",
            "8",
            "--no-client-cost",
            *SMALL,
            "--json",
            str(path),
            "--profile",
            str(tmp_path / "trace.json"),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        env={**ENVIRON, "TOKENSPEED_PLUGINS": left_out},
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert (
        f"which record the steps, are disabled: excluded by TOKENSPEED_PLUGINS={left_out}"
        in done.stderr
    )
    assert json.loads(path.read_text())["runs"][-1]["figures"]["answered"] == 2
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.release
def test_interrupt_during_profiling_keeps_all_results(
    tmp_path: Path,
) -> None:
    path = tmp_path / "result.json"
    child = subprocess.Popen(
        [
            *BENCH,
            "serve",
            "--users",
            "32",
            "--requests",
            "64",
            "--input-len",
            "16",
            "--output-len",
            "200",
            "--no-client-cost",
            *SMALL,
            "--json",
            str(path),
            "--profile",
            str(tmp_path / "trace.json"),
            "--served-model-name",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRON,
        start_new_session=True,
    )
    assert child.stderr is not None
    while "profile of load" not in child.stderr.readline():
        assert child.poll() is None
    os.killpg(child.pid, signal.SIGINT)
    _, said = child.communicate(timeout=120)
    assert child.returncode == 130, said
    assert "interrupted" in said
    (run,) = (
        run for run in json.loads(path.read_text())["runs"] if run["traffic"]["name"] == "load"
    )
    assert run["figures"]["answered"] == 64
    assert "is_part" not in run
    assert list(tmp_path.iterdir()) == [path]
    assert named(tmp_path) == []


def named(folder: Path) -> list[psutil.Process]:
    """Return the processes whose command names a folder."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(folder) in word for word in process.info["cmdline"] or ())
    ]


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.release),
        pytest.param(signal.SIGHUP, marks=pytest.mark.release),
    ],
)
def test_interrupt_keeps_results_and_stops_the_server(
    number: signal.Signals, tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    child = subprocess.Popen(
        [
            *BENCH,
            "serve",
            "--users",
            "2",
            "--requests",
            "5000",
            "--input-len",
            "16",
            "--output-len",
            "16",
            *SMALL,
            "--json",
            str(path),
            "--served-model-name",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRON,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # nohup has the tests ignore one
    )
    assert child.stdout is not None
    while "median of the next" not in child.stdout.readline():
        assert child.poll() is None
    time.sleep(3)
    assert any("serve" in process.info["cmdline"] for process in named(tmp_path))
    started = psutil.Process(child.pid).children(recursive=True)
    os.killpg(child.pid, number)
    _, said = child.communicate(timeout=120)
    assert child.returncode == 130, said
    assert "interrupted" in said
    result = json.loads(path.read_text())
    assert result["is_interrupted"]
    assert 0 < result["runs"][-1]["figures"]["answered"] < 5000
    assert result["runs"][-1]["is_part"]
    assert [each for each in started if each.is_running()] == []


def listens(process: psutil.Process) -> bool:
    """Say whether a process has a port on which others reach it."""
    return any(each.status == psutil.CONN_LISTEN for each in process.net_connections())


@pytest.mark.parametrize(
    ("num_requests", "is_alone"),
    [
        pytest.param("5000", False, id="under load"),
        pytest.param("4", True, id="the client alone", marks=pytest.mark.release),
    ],
)
def test_killed_bench_leaves_no_process(num_requests: str, is_alone: bool, tmp_path: Path) -> None:
    child = subprocess.Popen(
        [
            *BENCH,
            "serve",
            "--users",
            "2",
            "--requests",
            num_requests,
            "--input-len",
            "16",
            "--output-len",
            "16",
            *SMALL,
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**ENVIRON, "TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    assert child.stdout is not None
    while "median of the next" not in child.stdout.readline():
        assert child.poll() is None
    bench = psutil.Process(child.pid)
    words = bench.cmdline()
    forks: list[psutil.Process] = []  # clients, and for them alone a server of canned events
    while len(forks) < 2 + is_alone or any(map(listens, forks)) is not is_alone:
        assert child.poll() is None
        time.sleep(0.02)
        forks = [each for each in bench.children() if each.cmdline() == words]
    started = bench.children(recursive=True)
    assert len(started) > len(forks) + 1
    child.kill()
    child.communicate()
    _, left = psutil.wait_procs(started, timeout=60)
    assert left == []
    assert list(tmp_path.iterdir()) == []


def test_dead_server_fails_the_remaining_requests(
    tmp_path: Path,
) -> None:
    path = tmp_path / "result.json"
    child = subprocess.Popen(
        [
            *BENCH,
            "serve",
            "--users",
            "2",
            "--requests",
            "2000",
            "--input-len",
            "16",
            "--output-len",
            "16",
            *SMALL,
            "--json",
            str(path),
            "--served-model-name",
            str(tmp_path),
            "--no-client-cost",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRON,
    )
    assert child.stdout is not None
    while "median of the next" not in child.stdout.readline():
        assert child.poll() is None
    time.sleep(2)
    for process in named(tmp_path):
        if "serve" in process.info["cmdline"] and "bench" not in process.info["cmdline"]:
            process.kill()
    out, said = child.communicate(timeout=120)
    assert child.returncode == 1, said
    assert "the server ended with status -9" in said
    figures = json.loads(path.read_text())["runs"][-1]["figures"]
    assert figures["answered"] + figures["failed"] == 2000
    assert "no connection to" in out
