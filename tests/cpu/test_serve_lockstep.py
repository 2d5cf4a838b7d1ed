"""A server with engines that share experts: its answers, its end, and the death of a process."""

from __future__ import annotations

import json
import re
import signal
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import pytest
from serving import Background, Served, has_ended, ranks_of, served, wait_until

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


@pytest.mark.parametrize("tp", ["1", "2"])
def test_engines_with_shared_experts_match_one_process_and_drain(tmp_path: Path, tp: str) -> None:
    with LLM("demo-deepseek", device="cpu", kv_cache_memory="8MB", max_num_seqs=4) as llm:
        params = SamplingParams(temperature=0, max_tokens=16)
        expected = [each.outputs[0].text for each in llm.generate(PROMPTS, params)]
    with served(tmp_path, *FLAGS, *SHARED, "--tp", tp) as server:
        assert complete(server, PROMPTS[0]) == expected[0]  # one engine is idle
        with ThreadPoolExecutor(6) as threads:
            assert list(threads.map(lambda each: complete(server, each), PROMPTS)) == expected
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0, server.stderr()
        assert "Traceback" not in server.stderr()
        assert not server.sockets()


@pytest.mark.parametrize("num_requests", [0, 4], ids=["idle", "busy"])
@pytest.mark.parametrize(("tp", "engine", "rank"), [(1, 1, 0), (2, 0, 1), (2, 1, 0), (2, 1, 1)])
def test_death_of_a_process_ends_all_engines(
    tmp_path: Path, tp: int, engine: int, rank: int, num_requests: int
) -> None:
    with served(tmp_path, *FLAGS, *SHARED, "--tp", str(tp)) as server:
        children = psutil.Process(server.process.pid).children()
        engines = [
            [each, *ranks_of(each)]
            for each in sorted(children, key=lambda child: child.pid)
            if ENGINE in each.cmdline()
        ]
        assert [len(each) for each in engines] == [tp, tp]
        long = {"max_tokens": 1500, "ignore_eos": True}
        answers = [
            Background(partial(complete, server, each, **long)) for each in PROMPTS[:num_requests]
        ]

        def are_running() -> bool:
            with server.http() as client:
                stats = client.get("/v1/stats").json()
            return bool(stats.get("requests", {}).get("running", 0) == num_requests)

        wait_until(are_running, 60, "requests at work")
        engines[engine][rank].kill()
        assert server.process.wait(5) == 2, server.stderr()
        for answer in answers:
            assert isinstance(answer.result(5), urllib.error.HTTPError)
        wait_until(lambda: all(map(has_ended, chain(*engines))), 5, "all ended")
        # Another engine may report its end before the first one.
        assert re.search(rf"engine {engine} of 2(,.*, (ended|failed)| died|: )", server.stderr())
        if rank:
            assert f"rank {rank} of {tp} was killed by SIGKILL" in server.stderr()
        assert not server.sockets()
