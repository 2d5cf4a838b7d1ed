"""`tokenspeed bench` on the bundled demo, in process and through a server that it starts."""

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
from serving import has_ended, wait_until

pytestmark = pytest.mark.slow

BENCH = (sys.executable, "-P", "-m", "tokenspeed_core.cli", "bench")
SMALL = ("--device", "cpu", "--kv-cache-memory", "64MiB")
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    """Kill the processes of a failed test, which would slow down all later tests."""
    yield
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()


def run_bench(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark to its end."""
    return subprocess.run(
        [*BENCH, *words], capture_output=True, text=True, timeout=200, env=ENVIRON, check=False
    )


def bench(folder: Path, words: str, *more: str) -> tuple[dict[str, Any], str]:
    """Run a benchmark that succeeds; return its result file and its stdout."""
    path = folder / "result.json"
    done = run_bench(*words.split(), *more, *SMALL, "--json", str(path))
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text()), done.stdout


def start_bench(words: str, *more: str, **options: Any) -> subprocess.Popen[str]:
    """Start a benchmark and return it when its first request was answered."""
    child = subprocess.Popen(
        [*BENCH, *words.split(), *more, *SMALL],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **{"env": ENVIRON, **options},
    )
    assert child.stdout is not None
    while "median of the next" not in child.stdout.readline():
        assert child.poll() is None
    return child


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return the processes with a folder in their command lines."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(folder) in word for word in process.info["cmdline"] or ())
    ]


def track_names(trace: Path) -> set[str | None]:
    """Return the names of the tracks of a Chrome trace."""
    events = json.loads(trace.read_text())["traceEvents"]
    return {event.get("args", {}).get("name") for event in events}


@pytest.mark.release
@pytest.mark.parametrize(
    "words",
    [
        "prefill --requests 2 --input-len 2048",
        "agentic --shared-len 1024 --turn-len 64 --turns 2 --sessions 2",
        "agents --first-len 1024 --turn-len 64 --turns 2 --sessions 2",
    ],
    ids=lambda words: str(words).split()[0],
)
def test_demo_runs_long_workloads_only_if_shortened(words: str) -> None:
    name, *shorter = words.split()
    refused = run_bench(name, *SMALL)
    assert refused.returncode == 1
    assert name in refused.stderr
    done = run_bench(name, *shorter, "--repeats", "1", "--device", "cpu")
    assert done.returncode == 0, done.stderr


@pytest.mark.release
def test_agentic_turns_hit_the_cache_in_every_repeat(tmp_path: Path) -> None:
    words = (
        "agentic --sessions 3 --turns 3 --shared-len 160 --turn-len 32 --output-len 8 --repeats 2"
    )
    result, out = bench(tmp_path, words, "--plot", str(tmp_path / "x.svg"))
    start, run = result["runs"]
    figures = run["figures"]
    assert figures["output_tokens"] == 3 * 3 * 8
    assert figures["prompt_tokens"] == 3 * (3 * 192 + (1 + 2) * 40)
    assert 0.5 < figures["cached_tokens"] / figures["prompt_tokens"] < 0.95
    assert start["figures"]["first_request_ms"] > 0
    assert {op["family"] for op in result["kernel_plan"]["ops"]} == set(result["backends"])
    assert "from the cache" in out
    assert (tmp_path / "x.svg").read_text().startswith("<svg")


@pytest.mark.release
def test_profile_is_a_chrome_trace_with_our_track(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    _, out = bench(tmp_path, "latency --output-len 4 --repeats 1", "--profile", str(trace))
    assert "TokenSpeed: launches and gaps" in track_names(trace)
    assert "busy" in out


def test_server_is_started_measured_and_stopped(tmp_path: Path) -> None:
    result, out = bench(
        tmp_path,
        "serve --users 1,4 --requests 3,8 --input-len 48 --output-len 16 --fixed --no-client-cost",
        "--api-key",
        "secret",
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
    assert "8 answered, 0 failed" in out
    assert processes_of(tmp_path) == []


@pytest.mark.release
def test_server_profile_contains_its_steps(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    words = "serve --users 1,4 --requests 1,8 --input-len 16 --output-len 1,24 --fixed"
    files = ("--json", str(path), "--profile", str(tmp_path / "trace.json"))
    name = ("--no-client-cost", "--served-model-name", str(tmp_path))
    done = run_bench(*words.split(), *SMALL, *files, *name)
    # The first load is too short for a profile, which is status 1.
    assert done.returncode == 1, done.stderr
    assert "load, 1 user: no profile" in done.stderr
    assert "Traceback" not in done.stderr
    result = json.loads(path.read_text())
    assert [run["traffic"]["name"] for run in result["runs"]] == ["start", "first", "load", "load"]
    trace = tmp_path / "trace-2-users-4.json"
    assert str(trace) in done.stdout
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(str(event["name"]).startswith("step ") for event in events) == 24
    assert "TokenSpeed: launches and gaps" in track_names(trace)
    assert set(tmp_path.iterdir()) == {path, trace}
    assert processes_of(tmp_path) == []


@pytest.mark.release
def test_interrupt_during_profiling_keeps_all_results(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    child = start_bench(
        "serve --users 32 --requests 64 --input-len 16 --output-len 200 --no-client-cost",
        *("--json", str(path), "--profile", str(tmp_path / "trace.json")),
        *("--served-model-name", str(tmp_path)),
        start_new_session=True,
    )
    assert child.stderr is not None
    while "profile of load" not in child.stderr.readline():
        assert child.poll() is None
    os.killpg(child.pid, signal.SIGINT)
    _, err = child.communicate(timeout=120)
    assert child.returncode == 130, err
    runs = json.loads(path.read_text())["runs"]
    (load,) = (run for run in runs if run["traffic"]["name"] == "load")
    assert load["figures"]["answered"] == 64
    assert "is_part" not in load
    assert list(tmp_path.iterdir()) == [path]
    assert processes_of(tmp_path) == []


@pytest.mark.release
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupt_keeps_results_and_stops_the_server(
    number: signal.Signals, tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    child = start_bench(
        "serve --users 2 --requests 5000 --input-len 16 --output-len 16",
        *("--json", str(path), "--served-model-name", str(tmp_path)),
        start_new_session=True,
        # pytest under nohup ignores SIGHUP, and children inherit that
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    time.sleep(3)
    assert any("serve" in process.info["cmdline"] for process in processes_of(tmp_path))
    started = psutil.Process(child.pid).children(recursive=True)
    os.killpg(child.pid, number)
    _, err = child.communicate(timeout=120)
    assert child.returncode == 130, err
    result = json.loads(path.read_text())
    assert result["is_interrupted"]
    assert 0 < result["runs"][-1]["figures"]["answered"] < 5000
    assert result["runs"][-1]["is_part"]
    wait_until(lambda: all(map(has_ended, started)), 60, "the end of all processes")


def listens(process: psutil.Process) -> bool:
    """Whether a process has a listening port."""
    return any(each.status == psutil.CONN_LISTEN for each in process.net_connections())


@pytest.mark.parametrize(
    ("num_requests", "measures_client"),
    [
        pytest.param(5000, False, id="under load", marks=pytest.mark.release),
        pytest.param(4, True, id="during the client measurement", marks=pytest.mark.release),
    ],
)
def test_killed_bench_leaves_no_process(
    num_requests: int, measures_client: bool, tmp_path: Path
) -> None:
    child = start_bench(
        f"serve --users 2 --requests {num_requests} --input-len 16 --output-len 16",
        env={**ENVIRON, "TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    bench = psutil.Process(child.pid)
    words = bench.cmdline()
    # The client measurement has a mock server in addition to the two clients.
    forks: list[psutil.Process] = []
    while len(forks) < 2 + measures_client or any(map(listens, forks)) is not measures_client:
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


@pytest.mark.release
def test_dead_server_fails_the_remaining_requests(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    child = start_bench(
        "serve --users 2 --requests 2000 --input-len 16 --output-len 16 --no-client-cost",
        *("--json", str(path), "--served-model-name", str(tmp_path)),
    )
    time.sleep(2)
    for process in processes_of(tmp_path):
        if "serve" in process.info["cmdline"] and "bench" not in process.info["cmdline"]:
            process.kill()
    out, err = child.communicate(timeout=120)
    assert child.returncode == 1, err
    assert "status -9" in err
    figures = json.loads(path.read_text())["runs"][-1]["figures"]
    assert figures["answered"] + figures["failed"] == 2000
    assert "no connection to" in out
