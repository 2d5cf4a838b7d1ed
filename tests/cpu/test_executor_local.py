"""Engines of two processes: the same tokens as one process, and their end when a rank dies."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import psutil
import pytest
import torch
from serving import (
    COMMAND,
    Background,
    engine_of,
    environment,
    has_ended,
    ranks_of,
    served,
    wait_until,
)

from tokenspeed_core import LLM, AsyncLLM, RequestOutput, SamplingParams
from tokenspeed_core.api import FUSED_OP
from tokenspeed_core.api.structured_outputs import StructuredOutputs
from tokenspeed_core.config import Config
from tokenspeed_core.engine.factory import discover, resolve
from tokenspeed_core.engine.planning import plan_start
from tokenspeed_core.engine.runners import build_runner
from tokenspeed_core.errors import ConfigError, EngineDeadError
from tokenspeed_core.worker.platform import check_num_devices

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {"device": "cpu", "kv_cache_memory": "8MB", "max_num_seqs": 8}
PROMPTS = ["What is 23 + 45?", "Say hello.", "Count to five."]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_two_ranks_answer_as_one_process_until_one_dies() -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    sampled = SamplingParams(temperature=1, seed=7, max_tokens=24, n=2)
    masked = SamplingParams(seed=1, structured_outputs=StructuredOutputs(regex="[0-9]{3}-[a-z]{4}"))
    with LLM(**SMALL) as alone:
        expected = tokens(alone.chat(PROMPTS, params))
        expected_sampled = tokens(alone.chat(PROMPTS, sampled))
        expected_masked = tokens(alone.chat(PROMPTS, masked))
    with LLM(**SMALL, tensor_parallel_size=2) as llm:
        (rank,) = ranks_of(psutil.Process())
        assert tokens(llm.chat(PROMPTS, params)) == expected
        llm.reset_prefix_cache()
        llm._engine._depth = 2  # as on a device
        assert tokens(llm.chat(PROMPTS, params)) == expected
        assert tokens(llm.chat(PROMPTS, sampled)) == expected_sampled
        assert tokens(llm.chat(PROMPTS, masked)) == expected_masked
        killer = threading.Timer(0.5, rank.kill)
        killer.start()
        with pytest.raises(EngineDeadError, match=r"rank 1 of 2 was killed by SIGKILL"):
            llm.generate(["a"] * 64, SamplingParams(max_tokens=1000, ignore_eos=True))
        killer.join()
    assert has_ended(rank)


@pytest.mark.release
@pytest.mark.parametrize("model", ["demo", "demo-deepseek"])
def test_fused_all_reduces_give_the_tokens_of_one_process(model: str) -> None:
    settings = {**SMALL, "model": model, "dtype": "float32"}
    params = SamplingParams(temperature=0, max_tokens=24)
    prompts = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (5, 40, 130)]
    with LLM(**settings) as alone:
        expected = tokens(alone.generate(prompts, params))
    # Prompts have more tokens than the limit, decode steps fewer.
    fusion = {"enable_allreduce_fusion": True, "comm_fusion_max_num_tokens": 16}
    with LLM(**settings, tensor_parallel_size=2, **fusion) as llm:
        assert tokens(llm.generate(prompts, params)) == expected


@pytest.mark.parametrize(
    ("quantization", "layout", "op"),
    [
        ("fp8", {"tensor_parallel_size": 2}, f"{FUSED_OP}_fp8"),
        # Attention of the demo model has too few features for blocks on two processes.
        pytest.param(
            *("fp8-block", {"dense_tp_size": 2}, f"{FUSED_OP}_fp8_groups"),
            marks=pytest.mark.release,
        ),
    ],
)
def test_fused_all_reduces_before_fp8_layers_do_not_change_tokens(
    quantization: str, layout: dict[str, int], op: str
) -> None:
    settings = {**SMALL, **layout, "dtype": "float32", "quantization": quantization}
    params = SamplingParams(temperature=0, max_tokens=24)
    with LLM(**settings) as llm:
        expected = tokens(llm.chat(PROMPTS, params))
    with LLM(**settings, enable_allreduce_fusion=True, comm_fusion_max_num_tokens=16) as llm:
        assert [planned.backend for planned in llm.kernel_plan.find(op)] == ["torch"]
        assert tokens(llm.chat(PROMPTS, params)) == expected


@pytest.mark.release
def test_ctrl_c_ends_a_step_that_waits_for_a_stopped_rank() -> None:
    with LLM(**SMALL, tensor_parallel_size=2) as llm:
        (rank,) = ranks_of(psutil.Process())
        rank.suspend()
        presses = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        presses.start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            llm.generate("a", SamplingParams(max_tokens=100, ignore_eos=True))
        assert time.monotonic() - begin < 20
        presses.join()
    assert has_ended(rank)


def test_death_of_the_engine_ends_its_ranks() -> None:
    async def run() -> None:
        async with AsyncLLM(**SMALL, tensor_parallel_size=2) as llm:
            engine = next(
                child
                for child in psutil.Process().children()
                if "tokenspeed_core.engine.process" in child.cmdline()
            )
            (rank,) = ranks_of(engine)
            outputs = llm.generate("a", SamplingParams(max_tokens=1000, ignore_eos=True))
            await anext(outputs)
            engine.kill()
            with pytest.raises(EngineDeadError, match="rank 0 of 2 was killed by SIGKILL"):
                async for _ in outputs:
                    pass
            wait_until(lambda: has_ended(rank), 60, "the rank's end")

    asyncio.run(asyncio.wait_for(run(), 120))


@pytest.mark.release
@pytest.mark.parametrize("victim", range(4))
def test_death_of_a_rank_ends_the_server_and_all_requests(tmp_path: Path, victim: int) -> None:
    body = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True}
    with served(tmp_path, "--tp", "4", "--kv-cache-memory", "8MB") as server:
        engine = server.engine()
        processes = [engine, *ranks_of(engine)]
        assert len(processes) == 4

        def complete(stream: bool) -> httpx.Response:
            with server.http() as client:
                return client.post("/v1/completions", json={**body, "stream": stream})

        def are_running() -> bool:
            with server.http() as client:
                stats = client.get("/v1/stats").json()
            return bool(stats.get("requests", {}).get("running") == 8)

        answers = [Background(partial(complete, index % 2 == 0)) for index in range(8)]
        wait_until(are_running, 60, "8 requests at work")
        processes[victim].kill()
        assert server.process.wait(5) == 2
        for index, answer in enumerate(answers):
            response = answer.result(5)
            assert isinstance(response, httpx.Response), response
            # A stream has begun with status 200.
            assert response.status_code == (200 if index % 2 == 0 else 500)
            assert '"code":"engine_dead"' in response.text.replace(" ", "")
        # Nothing says which process is which of the other ranks.
        name = r"rank [123] of 4" if victim else "rank 0 of 4"
        assert re.search(rf"the engine died: {name} was killed by SIGKILL", server.stderr())
        wait_until(lambda: all(map(has_ended, processes)), 5, "all ended")
        assert not server.sockets()


@pytest.mark.release
def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    with served(tmp_path, "--tp", "2", "--kv-cache-memory", "8MB") as server:
        (rank,) = ranks_of(server.engine())
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 0
        wait_until(lambda: has_ended(rank), 60, "the rank's end")
        assert "Traceback" not in server.stderr()
        assert not server.sockets()


@pytest.mark.parametrize("is_engine_killed", [False, True])
def test_interrupted_start_leaves_no_folder(is_engine_killed: bool) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # short, for the paths of sockets
        folder = Path(name)
        process = subprocess.Popen(
            [*COMMAND, "serve", "demo", "--tp", "2", "--port", "0"],
            stderr=subprocess.DEVNULL,
            env=environment(folder),
        )
        try:
            wait_until(lambda: list(folder.glob("tokenspeed-*/*/plans")), 60, "the ranks' sockets")
            if is_engine_killed:
                engine_of(process.pid).kill()
            else:
                process.send_signal(signal.SIGINT)
            process.wait(30)
        finally:
            process.kill()
            process.wait()
        assert not list(folder.glob("tokenspeed-*"))


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def build_rank_zero(config: Config) -> None:
    catalog = discover(config)
    resolved = resolve(config, catalog, with_weights=False)
    build_runner(resolved, catalog, lambda *step: None, Mock(spec=()), None)


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("start", [plan_start, build_rank_zero])
def test_more_processes_than_devices_are_refused(start: Callable[[Config], Any]) -> None:
    with pytest.raises(ConfigError, match=r"2 CUDA devices.* --tensor-parallel-size") as caught:
        start(Config.from_keywords(tp=2))
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("one_gpu")
def test_dry_run_refuses_more_engines_than_devices() -> None:
    with pytest.raises(ConfigError, match=r"2 CUDA devices.* finds 1.* --data-parallel-size"):
        plan_start(Config.from_keywords(data_parallel_size=2))


@pytest.mark.usefixtures("one_gpu")
def test_too_few_devices_are_refused_in_one_line() -> None:
    for device, name in (("auto", "--tensor-parallel-size"), ("cuda:0", "CUDA_VISIBLE_DEVICES")):
        with pytest.raises(ConfigError, match=name) as caught:
            check_num_devices(device, 2)
        assert "\n" not in str(caught.value)
    check_num_devices("cuda:0", 1)
    check_num_devices("cpu", 2)
