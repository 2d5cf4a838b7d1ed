"""`AsyncLLM` with the demo model in an engine process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from tokenspeed_core import AsyncLLM, BadRequestError, RequestOutput, SamplingParams
from tokenspeed_core.engine.client import EngineClient
from tokenspeed_core.errors import ConfigError, EngineDeadError, TokenSpeedError

GREEDY = SamplingParams(temperature=0, max_tokens=60)
ENDLESS = SamplingParams(max_tokens=400, ignore_eos=True)
QUESTION = "what is 23 + 45?"
IDS = {"prompt_token_ids": [5, 6, 7, 8]}

Run = Callable[[Callable[[AsyncLLM], Awaitable[None]]], None]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Return a function that runs a test's coroutine with an engine that all tests share."""
    with asyncio.Runner() as runner:
        llm = AsyncLLM(max_model_len=512, max_num_seqs=8, kv_cache_memory="8MB")
        runner.run(asyncio.wait_for(llm.start(), 120))
        yield lambda test: runner.run(asyncio.wait_for(test(llm), 60))  # type: ignore[arg-type]
        runner.run(llm.shutdown())


async def whole(outputs: Any) -> list[RequestOutput]:
    return [output async for output in outputs]


async def idle(llm: AsyncLLM) -> None:
    """Wait until the engine has no work."""
    client = None if llm._engine is None else llm._engine.connection
    assert isinstance(client, EngineClient)
    while client.num_live or client.has_work:
        await asyncio.sleep(0.05)


def test_chat_yields_growing_outputs(run: Run) -> None:
    async def test(llm: AsyncLLM) -> None:
        outputs = await whole(llm.chat(QUESTION, GREEDY, enable_thinking=False))
        texts = [str(output.outputs[0].text) for output in outputs]
        assert len(outputs) > 1
        assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
        assert texts[-1].endswith("68")
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].outputs[0].finish_reason == "stop"

    run(test)


def test_deltas_add_up_to_the_whole(run: Run) -> None:
    async def test(llm: AsyncLLM) -> None:
        params = SamplingParams(temperature=1, seed=3, n=3, max_tokens=20, logprobs=1)
        last = (await whole(llm.generate("hello", params)))[-1]
        deltas = await whole(llm.generate("hello", params, delta=True))
        for i, expected in enumerate(last.outputs):
            parts = [output.outputs[i] for output in deltas]
            assert [token for part in parts for token in part.token_ids] == expected.token_ids
            assert "".join(str(part.text) for part in parts) == expected.text
            logprobs = [entry for part in parts for entry in part.logprobs or ()]
            assert [list(entry) for entry in logprobs] == [list(e) for e in expected.logprobs or ()]
            assert parts[-1].finish_reason == expected.finish_reason

    run(test)


def test_requests_run_concurrently(run: Run) -> None:
    async def test(llm: AsyncLLM) -> None:
        first, second = llm.generate(IDS, ENDLESS), llm.generate(IDS, ENDLESS)
        for _ in range(3):
            await anext(first)
            await anext(second)
        await first.aclose()  # type: ignore[attr-defined]
        await second.aclose()  # type: ignore[attr-defined]

    run(test)


def test_stop_string_ends_the_request(run: Run) -> None:
    async def test(llm: AsyncLLM) -> None:
        params = GREEDY.model_copy(update={"stop": ("68",)})
        outputs = await whole(llm.chat(QUESTION, params, enable_thinking=False))
        assert "68" not in str(outputs[-1].outputs[0].text)
        assert outputs[-1].outputs[0].finish_reason == "stop"
        await idle(llm)

    run(test)


def test_prompt_logprobs_come_with_every_output(run: Run) -> None:
    async def test(llm: AsyncLLM) -> None:
        params = SamplingParams(prompt_logprobs=1, max_tokens=0)
        (output,) = await whole(llm.generate(IDS, params))
        assert output.prompt_logprobs is not None
        assert [entry is None for entry in output.prompt_logprobs] == [True] + [False] * 3

    run(test)


def test_abort_ends_a_request(run: Run) -> None:
    async def test(llm: AsyncLLM) -> None:
        outputs = []
        async for output in llm.generate(IDS, ENDLESS, request_id="mine"):
            outputs.append(output)
            await llm.abort("mine")
        assert {output.request_id for output in outputs} == {"mine"}
        assert outputs[-1].outputs[0].finish_reason == "abort"
        assert outputs[-1].finished
        await llm.abort("mine")
        await idle(llm)

    run(test)


def test_leaving_the_loop_aborts(run: Run) -> None:
    async def test(llm: AsyncLLM) -> None:
        async with contextlib.aclosing(llm.generate(IDS, ENDLESS, "a")) as outputs:  # type: ignore[type-var]
            async for _ in outputs:
                break
        await idle(llm)
        assert not llm._requests

    run(test)


def test_cancelled_task_aborts_its_request(run: Run) -> None:
    async def test(llm: AsyncLLM) -> None:
        task = asyncio.create_task(whole(llm.generate(IDS, ENDLESS, "b")))
        while "b" not in llm._requests:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(llm)
        assert not llm._requests

    run(test)


@pytest.mark.parametrize(
    ("prompt", "params", "priority", "shown"),
    [
        (5, None, 0, "prompt"),
        ({"prompt_token_ids": [10**6]}, None, 0, "vocab|ids of this model"),
        ("a", {"max_tokens": 4}, 0, "sampling_params"),
        ("a", None, 3, "schedule_policy"),
    ],
)
def test_invalid_request_is_refused(
    run: Run, prompt: Any, params: Any, priority: int, shown: str
) -> None:
    async def test(llm: AsyncLLM) -> None:
        with pytest.raises(BadRequestError, match=shown):
            await whole(llm.generate(prompt, params, priority=priority))

    run(test)


def test_request_id_in_use_is_refused(run: Run) -> None:
    async def test(llm: AsyncLLM) -> None:
        first = llm.generate(IDS, ENDLESS, "same")
        await anext(first)
        with pytest.raises(BadRequestError, match="same"):
            await whole(llm.generate(IDS, GREEDY, "same"))
        await first.aclose()  # type: ignore[attr-defined]
        assert len(await whole(llm.generate(IDS, GREEDY, "same"))) >= 1

    run(test)


def test_client_process_imports_no_torch() -> None:
    code = (
        "import sys; from tokenspeed_core import AsyncLLM; llm = AsyncLLM(); "
        "from tokenspeed_core.async_llm import _prepare; _prepare(llm._config); "
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_settings_of_the_server_are_refused() -> None:
    with pytest.raises(ConfigError, match="port"):
        AsyncLLM(port=8001)  # type: ignore[call-arg]


def test_engine_that_cannot_start_raises() -> None:
    async def start() -> None:
        async with AsyncLLM(max_total_tokens=64, max_model_len=100):
            raise AssertionError("the engine started")

    with pytest.raises(EngineDeadError, match="--max-model-len 100"):
        asyncio.run(asyncio.wait_for(start(), 120))


def test_shutdown_fails_running_requests() -> None:
    async def run() -> None:
        llm = AsyncLLM(max_model_len=256, max_num_seqs=2, kv_cache_memory="4MB")
        with pytest.raises(TokenSpeedError, match="not started"):
            await whole(llm.generate("a"))
        async with llm:
            await llm.check_health()
            running = llm.generate(IDS, ENDLESS.model_copy(update={"max_tokens": 200}))
            await anext(running)
            await llm.shutdown()
            with pytest.raises(EngineDeadError):
                await whole(running)
        with pytest.raises(TokenSpeedError, match="shut down"):
            await whole(llm.generate("a"))

    asyncio.run(asyncio.wait_for(run(), 120))
