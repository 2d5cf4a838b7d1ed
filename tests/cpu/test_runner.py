"""The worker on a CPU: tokens do not depend on the batch, the chunks or earlier sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from host_graphs import capture_decodes
from tokenspeed_testing.plans import PlanMaker

from tokenspeed_core.api.step import OutOfMemory, StepFailed, StepPlan
from tokenspeed_core.engine.wire import Codec, pack
from tokenspeed_core.worker.local import LocalRunner

PROMPTS = {"a": list(range(3, 26)), "b": [7, 7, 90, 1], "c": list(range(60, 20, -1)), "d": [96]}


def alone(runner: LocalRunner, prompt: list[int], count: int) -> list[int]:
    """Generate greedily, recomputing the whole sequence for every token."""
    tokens = list(prompt)
    for _ in range(count):
        maker = PlanMaker(runner.block_size)
        maker.add("x", tokens, slot=0)
        maker.step(runner, chunks={"x": len(tokens)})
        tokens = maker.sequences["x"].tokens
    return tokens[len(prompt) :]


@pytest.fixture
def expected(runner: LocalRunner) -> dict[str, list[int]]:
    found = {name: alone(runner, prompt, 8) for name, prompt in PROMPTS.items()}
    runner.forget()
    assert len({token for tokens in found.values() for token in tokens}) > 8, (
        "the model must not be constant"
    )
    return found


def check_next_step(runner: LocalRunner, expected: dict[str, list[int]]) -> None:
    """Require that the runner works after a failed step."""
    maker = PlanMaker(runner.block_size)
    maker.add("b", PROMPTS["b"], 0)
    maker.step(runner, chunks={"b": 4})
    assert maker.sequences["b"].output == expected["b"][:1]


@pytest.mark.parametrize("size", [1, 3, 4, 7])
def test_mixed_chunks_and_decodes_change_no_token(
    runner: LocalRunner, expected: dict[str, list[int]], size: int
) -> None:
    maker = PlanMaker(runner.block_size)
    for slot, (name, prompt) in enumerate(PROMPTS.items()):
        maker.add(name, prompt, slot)
    maker.step(runner, chunks={"b": 4})
    while any(len(maker.sequences[name].output) < 8 for name in PROMPTS):
        rows = maker.sequences
        decodes = [n for n, s in rows.items() if s.output and len(s.output) < 8]
        chunks = {
            n: min(size, s.num_prompt - s.num_computed)
            for n, s in rows.items()
            if s.num_computed < s.num_prompt
        }
        maker.step(runner, decodes, chunks)
    assert {name: maker.sequences[name].output for name in PROMPTS} == expected


def test_reused_slot_starts_empty(runner: LocalRunner, expected: dict[str, list[int]]) -> None:
    maker = PlanMaker(runner.block_size)
    for name in ("c", "a", "d"):
        maker.add(name, PROMPTS[name], slot=5)
        maker.step(runner, chunks={name: len(PROMPTS[name])})
        for _ in range(7):
            maker.step(runner, decodes=[name])
        assert maker.sequences[name].output == expected[name]
        maker.drop(name)


def test_rows_share_blocks_filled_in_the_same_step(
    runner: LocalRunner, expected: dict[str, list[int]]
) -> None:
    maker = PlanMaker(runner.block_size)
    maker.add("first", PROMPTS["a"], slot=0)
    first = maker.sequences["first"]
    first.blocks[0] = list(range(6))
    maker.next_page = 6
    maker.add("a", PROMPTS["a"], slot=1, shared=("first", 20))
    maker.step(runner, chunks={"first": 23, "a": 3})
    assert maker.sequences["a"].output == first.output == expected["a"][:1]


def test_serialized_plan_gives_the_same_result(
    runner: LocalRunner, make_runner: Callable[..., LocalRunner]
) -> None:
    second = make_runner()
    codec = Codec(StepPlan)
    maker = PlanMaker(runner.block_size)
    maker.add("a", PROMPTS["a"], 0, temperature=1.0, seed=-3, logprobs=2, bias={4: 1.5})
    maker.add("b", PROMPTS["b"], 1, repetition_penalty=1.3)
    for decodes, chunks in (((), {"a": 9, "b": 4}), (("b",), {"a": 14}), (("a", "b"), {})):
        plan = maker.plan(decodes, chunks)
        results = []
        for each, given in ((runner, plan), (second, codec.unpack(pack(plan)))):
            each.forward(given)
            each.sample(plan.step_id, None)
            results.append(each.collect(plan.step_id))
        maker.take(plan, results[0])
        assert results[0].token_ids.tolist() == results[1].token_ids.tolist()
        assert (results[0].logprobs is None) == (results[1].logprobs is None)


def test_empty_step_gives_an_empty_result(runner: LocalRunner) -> None:
    maker = PlanMaker(runner.block_size)
    result = maker.step(runner)
    assert result.num_tokens.tolist() == result.token_ids.tolist() == []


def test_partial_chunk_samples_no_token(runner: LocalRunner) -> None:
    maker = PlanMaker(runner.block_size)
    maker.add("a", PROMPTS["a"], 0)
    maker.add("b", PROMPTS["b"], 1)
    result = maker.step(runner, chunks={"a": 5, "b": 4})
    assert result.num_tokens.tolist() == [0, 1]
    assert len(result.token_ids) == 1


def test_device_error_in_a_partial_chunk_fails_the_step(
    runner: LocalRunner, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(ids: torch.Tensor) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    maker = PlanMaker(runner.block_size)
    maker.add("a", PROMPTS["a"], 0)
    plan = maker.plan(chunks={"a": 5})
    runner.forward(plan)
    with monkeypatch.context() as patch:
        patch.setattr(runner._transfer, "fetch_ids", fetch)
        with pytest.raises(StepFailed, match="CUDA error: an illegal"):
            runner.sample(plan.step_id, None)
    check_next_step(runner, expected)


def test_runner_survives_out_of_memory(
    runner: LocalRunner, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    maker = PlanMaker(runner.block_size)
    maker.add("b", PROMPTS["b"], 0)
    plan = maker.plan(chunks={"b": 4})
    with monkeypatch.context() as patch:
        patch.setattr(runner._model, "logits", allocate)
        with pytest.raises(OutOfMemory, match="CUDA out of memory"):
            runner.forward(plan)
    check_next_step(runner, expected)


def test_unsupported_plan_fails_only_its_step(
    runner: LocalRunner, expected: dict[str, list[int]]
) -> None:
    maker = PlanMaker(runner.block_size)
    maker.add("b", PROMPTS["b"], 0)
    plan = replace(maker.plan(chunks={"b": 4}), adapter_ids=np.array([3], np.int32))
    with pytest.raises(StepFailed, match="adapter"):
        runner.forward(plan)
    check_next_step(runner, expected)


def test_closing_frees_every_captured_step(
    make_runner: Callable[..., LocalRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner()
    capture_decodes(runner, (1, 2), monkeypatch)
    captured = runner._graphs
    assert captured is not None
    graphs = [graph for bucket in captured._buckets.values() for graph in bucket.graphs]
    graphs += [*captured._draws.values()]
    assert len(graphs) >= 4
    runner.close()
    runner.close()
    assert all(graph.is_reset for graph in graphs)
