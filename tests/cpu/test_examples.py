"""The programs in examples/ run as described in their README."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Served, served

pytestmark = pytest.mark.tree

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = ("--tool-call-parser", "qwen", "--reasoning-parser", "qwen3")
    with served(tmp_path_factory.mktemp("server"), *flags) as server:
        yield server


def run(name: str, **environ: str) -> str:
    """Run an example and return its output."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "NO_PROXY": "*", **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_offline_batch_answers_every_question() -> None:
    lines = run("offline_batch.py").splitlines()
    answers = [line.split(" -> ")[1] for line in lines]
    assert answers == ["23 + 45 = 68", "hello world", "the dog sat"]


def test_async_requests_answer_every_question() -> None:
    answers = {line.split(" -> ")[1] for line in run("async_requests.py").splitlines()}
    assert answers == {"23 + 45 = 68", "hello world", "the dog sat"}


def test_chat_client_streams_the_answer(server: Served) -> None:
    assert "68" in run("chat_client.py", TOKENSPEED_URL=server.url)


def test_tool_example_calls_the_function_and_answers(server: Served) -> None:
    printed = run("tool_calls.py", TOKENSPEED_URL=server.url)
    assert "call: get_weather({'city': 'Paris'})" in printed
    assert "21" in printed.partition("answer: ")[2]


@pytest.mark.release
def test_kernel_plugin_is_selected_and_conforms(tmp_path: Path) -> None:
    site = tmp_path / "site"
    plugin = EXAMPLES / "acme_rms_norm"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
        + ["--no-build-isolation", "--target", str(site), str(plugin)],
        check=True,
        timeout=120,
    )
    environ = {**os.environ, "PYTHONPATH": str(site)}
    checked = subprocess.run(
        [sys.executable, "-P", "-m", "tokenspeed_core.cli", "plugins", "check", "acme-rms-norm"],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    program = (
        "from tokenspeed_core import LLM, SamplingParams\n"
        "llm = LLM(kernel_backend={'rms_norm': 'acme/torch'}, max_total_tokens=1024)\n"
        "print(llm.kernel_plan.to_json())"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert '"acme/torch"' in done.stdout, done.stderr
