"""`tokenspeed serve` as a user starts it: the bundled demo on this machine's CPU, engine process and all."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import psutil
import pytest


@contextmanager
def served(folder: Path, *flags: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run the server until the block ends; yield its URL once it says that it serves."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "tokenspeed_core.cli", "serve", "--port", "0", *flags],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.search(r"at (http://\S+)", line)
        assert found, f"it said {line!r} and ended with {process.poll()}"
        yield found[1], process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{url}/v1", api_key="any", max_retries=0, http_client=httpx.Client(trust_env=False, timeout=30)
    )


def engine_of(process: subprocess.Popen[str]) -> psutil.Process:
    return next(child for child in psutil.Process(process.pid).children() if "engine" in " ".join(child.cmdline()))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with served(tmp_path_factory.mktemp("serve")) as running:
        yield running


@pytest.fixture
def server(running: tuple[str, subprocess.Popen[str]]) -> str:
    return running[0]


@pytest.fixture
def engine(running: tuple[str, subprocess.Popen[str]]) -> psutil.Process:
    return engine_of(running[1])


def test_the_demo_adds(server: str) -> None:
    answer = client(server).chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "What is 23 + 45?"}], temperature=0
    )
    assert "68" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


def test_a_stream_is_the_whole_and_a_repeated_prompt_is_cached(server: str) -> None:
    sdk = client(server)
    ask = {"model": "demo", "prompt": list(range(40, 100)), "temperature": 0, "max_tokens": 24}
    whole = sdk.completions.create(**ask)
    chunks = list(sdk.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens
    assert usage.prompt_tokens == 60


def test_many_at_once_each_get_what_they_get_alone(server: str) -> None:
    sdk = client(server)

    def ask(number: int) -> str:
        return sdk.completions.create(
            model="demo", prompt=f"What is {number} + {number + 7}?", temperature=0, max_tokens=12
        ).choices[0].text

    alone = [ask(number) for number in range(8)]
    together: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda n=number: together.setdefault(n, ask(n))) for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[number] for number in range(8)] == alone


def test_log_probabilities_and_n_and_stop_work_on_the_model(server: str) -> None:
    answer = client(server).chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "What is 3 + 4?"}], n=3, temperature=1, seed=1,
        logprobs=True, top_logprobs=2, stop=["</think>"],
    )
    assert len(answer.choices) == 3
    for choice in answer.choices:
        assert "</think>" not in (choice.message.content or "")
        assert choice.logprobs is not None
        for entry in choice.logprobs.content or []:
            assert entry.logprob <= 0
            assert len(entry.top_logprobs) == 2


@pytest.mark.parametrize("streams", [True, False])
def test_when_the_clients_have_left_the_engine_rests(server: str, engine: psutil.Process, streams: bool) -> None:
    body = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": streams, "n": 4}
    with pytest.raises(httpx.ReadTimeout), httpx.Client(trust_env=False) as http:
        http.post(f"{server}/v1/completions", json=body, timeout=httpx.Timeout(20, read=0.5 if not streams else 0.01))
    time.sleep(0.3)
    before = sum(engine.cpu_times()[:2])
    time.sleep(2)
    assert sum(engine.cpu_times()[:2]) - before < 0.1


def test_a_server_drains_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with served(tmp_path) as (url, process):
        engine = engine_of(process)
        texts: list[int] = []

        def ask() -> None:
            answer = client(url).completions.create(
                model="demo", prompt="a", max_tokens=300, extra_body={"ignore_eos": True}
            )
            texts.append(answer.usage.completion_tokens if answer.usage else 0)

        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        thread.join()
        assert texts == [300]
        assert not engine.is_running()
        assert not list(tmp_path.glob("*tokenspeed-*"))


@pytest.mark.parametrize("victim", ["engine", "server"])
def test_a_killed_process_takes_the_other_with_it(tmp_path: Path, victim: str) -> None:
    with served(tmp_path) as (_, process):
        engine = engine_of(process)
        (engine if victim == "engine" else process).kill()
        status = process.wait(15)
        assert status > 0 if victim == "engine" else status == -signal.SIGKILL
        engine.wait(15)
