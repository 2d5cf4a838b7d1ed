"""A server with several engines that share nothing answers as one process does."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from serving import served, wait_until
from test_executor_local import ranks_of
from test_serve_lockstep import complete

from tokenspeed_core import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.release]

PROMPTS = [f"What is {number} + {2 * number}?" for number in range(11, 19)]
NUM_TOKENS = 20


@pytest.mark.parametrize(
    ("model", "flags", "num_processes"),
    [
        ("demo", "", 1),
        ("demo", "--tp 2", 2),
        ("demo-deepseek", "--tp 2 --ep-size 2", 2),
        ("demo-deepseek", "--ep-size 2", 2),
    ],
)
def test_replicas_answer_as_one_process(
    tmp_path: Path, model: str, flags: str, num_processes: int
) -> None:
    with LLM(model, device="cpu", dtype="float32", kv_cache_memory="8MB", max_num_seqs=8) as llm:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        expected = [each.outputs[0].text for each in llm.generate(PROMPTS, params)]
    settings = ("--device", "cpu", "--dtype", "float32", "--kv-cache-memory", "8MB")
    replicas = ("--max-num-seqs", "8", "--data-parallel-size", "2")
    with served(tmp_path, model, *settings, *replicas, *flags.split()) as server:
        ranks = ranks_of(psutil.Process(server.process.pid))
        assert len(ranks) == 2 * (num_processes - 1)

        def answer(prompt: str) -> str:
            return complete(server, prompt, max_tokens=NUM_TOKENS, ignore_eos=True)

        with ThreadPoolExecutor(len(PROMPTS)) as threads:
            assert list(threads.map(answer, PROMPTS)) == expected

        def num_tokens() -> list[int]:
            with server.http() as client:
                stats = client.get("/v1/stats").json()
            return [each["totals"]["output_tokens"] for each in stats.get("replicas", ())]

        # The statistics are renewed every second.
        wait_until(lambda: sum(num_tokens()) == len(PROMPTS) * NUM_TOKENS, 30, "all counted")
        assert len(num_tokens()) == 2
        assert min(num_tokens()) > 0
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0, server.stderr()
