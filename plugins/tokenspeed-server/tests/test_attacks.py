"""The repository's tools that attack a server, run for a short time against the fake engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_support import Running, running

TOOLS = Path(__file__).parents[3] / "tools"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (TOOLS / "soak.py").is_file(), reason="the tools are not in this tree"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    engine = {"step_seconds": 0.002, "max_model_len": 4096}
    options = {"request_timeout": 20.0}
    folder = tmp_path_factory.mktemp("server")
    with running(folder, engine=engine, options=options) as server:
        yield server


def run(tool: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", str(TOOLS / tool), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_short_soak_finds_no_failure(server: Running) -> None:
    pid = str(server.process.pid)
    done = run("soak.py", server.url, "--requests", "150", "--concurrency", "8", "--pid", pid)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "BAD" not in done.stdout


def test_invalid_requests_of_every_route_get_no_5xx(server: Running) -> None:
    words = ("--examples", "3", "--mode", "negative", "--phases", "fuzzing")
    done = run("fuzz.py", server.url, *words)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.release
def test_attacks_leave_a_working_server(server: Running) -> None:
    # Other tests run at the same time, so the gaps are those of a busy machine.
    words = ("--max-ms", "5000", "--megabytes", "1", "--seconds", "0.1")
    done = run("attacks.py", server.url, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    with server.client() as client:
        answer = client.post("/v1/completions", json={"prompt": [5], "max_tokens": 2})
        assert answer.status_code == 200
    assert "Traceback" not in server.complaints()
