"""A server with engines that share experts: its answers, its end, and the death of an engine."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from serving import Served, served, wait_until

from tokenspeed_core import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.release]

FLAGS = ("demo-deepseek", "--device", "cpu", "--kv-cache-memory", "8MB", "--max-num-seqs", "4")
SHARED = ("--data-parallel-size", "2", "--enable-expert-parallel")
PROMPTS = [f"Count from {number} to {number + 3}." for number in range(6)]
ENGINE = "tokenspeed_core.engine.process"


def complete(server: Served, prompt: str, **more: Any) -> str:
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, **more}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["choices"][0]["text"])


def test_engines_with_shared_experts_match_one_process_and_drain(tmp_path: Path) -> None:
    with LLM("demo-deepseek", device="cpu", kv_cache_memory="8MB", max_num_seqs=4) as llm:
        params = SamplingParams(temperature=0, max_tokens=16)
        expected = [each.outputs[0].text for each in llm.generate(PROMPTS, params)]
    with served(tmp_path, *FLAGS, *SHARED) as server:
        assert complete(server, PROMPTS[0]) == expected[0]  # one engine is idle
        with ThreadPoolExecutor(6) as threads:
            assert list(threads.map(lambda each: complete(server, each), PROMPTS)) == expected
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0, (tmp_path / "stderr").read_text()


def test_death_of_an_engine_ends_all(tmp_path: Path) -> None:
    with served(tmp_path, *FLAGS, *SHARED) as server:
        parent = psutil.Process(server.process.pid)
        engines = [each for each in parent.children() if ENGINE in each.cmdline()]
        assert len(engines) == 2
        engines[1].kill()
        wait_until(lambda: server.process.poll() is not None, 15, "the server's end")
        assert server.process.returncode not in (0, None)
        assert not any(each.is_running() for each in engines)
        # The server names the engine, unless the other one has ended before it looks.
        assert re.search("engine 1 of 2|SIGKILL", (tmp_path / "stderr").read_text())
