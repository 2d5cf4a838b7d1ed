"""Engines that share experts execute captured steps together, with the tokens of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from lockstep_engine import Served
from process_pool import ProcessPool
from test_lockstep import (
    TENSOR_PARALLEL,
    UNEVEN,
    Prompts,
    alone,
    prompt,
    qwen3_moe,
    together,
    tokens,
)

from tokenspeed_core.api.step import PromptTargets, StepSize
from tokenspeed_core.worker.buckets import BucketFinder, bucket_sizes, draft_sizes
from tokenspeed_core.worker.execute import LocalRunner
from tokenspeed_core.worker.padding import SharedPadding
from tokenspeed_core.worker.staged import BucketSize
from tokenspeed_core.worker.warmup import largest_step

__all__ = ["qwen3_moe"]  # a fixture

CAPTURES = (1, 2, 4)
DRAFTS = {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 4}


def num_steps(served: Served) -> int:
    return served.num_steps + served.num_joined


def check_all_captured(served: Sequence[Served]) -> None:
    """Check that each engine ran the same captured step in every step."""
    first = served[0]
    assert len(first.captured) == num_steps(first) > 0
    assert all(each.captured == first.captured for each in served)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompts", "tp"),
    [
        pytest.param(UNEVEN, 1, id="uneven"),
        pytest.param(UNEVEN, 2, id="uneven-tp2"),
        pytest.param(([], UNEVEN[0][:2]), 1, id="idle", marks=pytest.mark.release),
        pytest.param(([], UNEVEN[0][:2]), 2, id="idle-tp2", marks=pytest.mark.release),
        pytest.param(([], UNEVEN[0][:2], [], UNEVEN[1]), 1, id="four"),
    ],
)
def test_captured_steps_generate_the_tokens_of_one_process(
    pool: ProcessPool, qwen3_moe: str, prompts: Sequence[Prompts], tp: int
) -> None:
    served = together(pool, qwen3_moe, prompts, captures=CAPTURES, tp=tp)
    assert [tokens(each) for each in served] == alone(qwen3_moe, prompts)
    check_all_captured(served)
    assert {bool(size.num_chunks) for size in served[0].captured} == {False, True}


@pytest.mark.parametrize(
    ("others", "settings"),
    [
        pytest.param([], {}, id="idle-decodes"),
        pytest.param(UNEVEN[1], DRAFTS, id="busy-drafts"),
        pytest.param([], DRAFTS, id="idle-drafts", marks=pytest.mark.release),
        pytest.param(UNEVEN[1], {}, id="busy-decodes", marks=pytest.mark.release),
    ],
)
def test_experts_skip_padding_in_captured_steps(
    pool: ProcessPool, qwen3_moe: str, others: Prompts, settings: dict[str, object]
) -> None:
    prompts: Sequence[Prompts] = ([prompt(4, seed) * 5 for seed in (1, 2, 3)], others)
    served = together(pool, qwen3_moe, prompts, captures=(4,), **settings)
    for each in served:
        assert len(each.num_tokens) == len(each.captured) > 0
        assert each.num_routed == each.num_tokens
        assert any(
            min(counts) < size.num_tokens
            for counts, size in zip(each.num_tokens, each.captured, strict=True)
        )
    assert served[0].num_tokens == served[1].num_tokens
    assert any(size.num_draft_tokens for size in served[0].captured) == bool(settings)


@pytest.mark.parametrize("tp", [1, TENSOR_PARALLEL])
def test_prompts_arrive_while_another_engine_decodes(
    pool: ProcessPool, qwen3_moe: str, tp: int
) -> None:
    prompts: Sequence[Prompts] = (UNEVEN[0][1:3], [prompt(40, 1), prompt(9, 7)])
    first, second = together(pool, qwen3_moe, prompts, delays=(0, 6), captures=CAPTURES, tp=tp)
    assert [tokens(first), tokens(second)] == alone(qwen3_moe, prompts)
    check_all_captured([first, second])
    assert second.num_joined >= 6
    decodes = [size.num_chunks == 0 for size in first.captured]
    assert True in decodes[: decodes.index(False, decodes.index(True))]  # then prompts again


@pytest.mark.parametrize("tp", [1, TENSOR_PARALLEL])
def test_step_without_captured_size_makes_all_engines_eager(
    pool: ProcessPool, qwen3_moe: str, tp: int
) -> None:
    long = [prompt(80, 5)]  # captured steps hold up to 64 prompt tokens
    prompts: Sequence[Prompts] = (UNEVEN[0][1:3], long)
    sharing = {"chunked_prefill_size": 96}
    served = together(pool, qwen3_moe, prompts, delays=(0, 4), captures=CAPTURES, tp=tp, **sharing)
    assert [tokens(each) for each in served] == alone(qwen3_moe, prompts)
    assert served[0].captured == served[1].captured
    assert len(served[0].captured) == num_steps(served[0]) - 1


def test_abort_keeps_the_tokens_of_captured_steps(pool: ProcessPool, qwen3_moe: str) -> None:
    prompts: Sequence[Prompts] = (UNEVEN[0][1:3], UNEVEN[1])
    served = together(pool, qwen3_moe, prompts, abort_after=4, captures=CAPTURES)
    for each, whole in zip(served, alone(qwen3_moe, prompts), strict=True):
        aborted, *others = tokens(each)
        assert 0 < len(aborted) < len(whole[0])
        assert aborted == whole[0][: len(aborted)]
        assert others == whole[1:]
    check_all_captured(served)


@pytest.mark.parametrize(
    ("others", "tp"),
    [
        pytest.param([], 1, id="idle"),
        pytest.param(UNEVEN[1], 1, id="busy"),
        pytest.param(UNEVEN[1], 2, id="busy-tp2", marks=pytest.mark.release),
    ],
)
def test_captured_drafts_generate_the_tokens_of_one_process(
    pool: ProcessPool, qwen3_moe: str, others: Prompts, tp: int
) -> None:
    """Draft token counts of the others change, while all other inputs of an idle engine stay the same."""
    prompts: Sequence[Prompts] = ([prompt(4, seed) * 5 for seed in (1, 2, 3, 4)], others)
    limits = {"num_tokens": 60, "captures": (4,), "tp": tp}
    served = together(pool, qwen3_moe, prompts, delays=(0, 20 if others else 0), **limits, **DRAFTS)
    assert [tokens(each) for each in served] == alone(qwen3_moe, prompts, 60)
    assert served[0].captured == served[1].captured
    assert any(size.num_draft_tokens for size in served[0].captured)


@pytest.mark.parametrize("tp", [1, TENSOR_PARALLEL])
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="fixed experts", marks=pytest.mark.release),
        pytest.param({"enable_eplb": True, "eplb_interval": 4}, id="experts that move"),
    ],
)
def test_captured_latent_attention_gives_the_same_tokens(
    pool: ProcessPool, settings: dict[str, object], tp: int
) -> None:
    prompts: Sequence[Prompts] = ([prompt(20, 1), prompt(3, 2)], [prompt(7, 3)])
    served = together(pool, "demo-deepseek", prompts, captures=CAPTURES, tp=tp, **settings)
    assert [tokens(each) for each in served] == alone("demo-deepseek", prompts)
    check_all_captured(served)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([StepSize(3)], BucketSize(4, 0, 0)),
        ([StepSize(3), StepSize(), StepSize(5)], BucketSize(8, 0, 0)),
        ([StepSize(40), StepSize(0, 0, 2, 30)], BucketSize(64, 16, 32)),
        ([StepSize(3), StepSize(1, 8)], BucketSize(4, 0, 0, num_draft_tokens=16)),
        ([StepSize(3, 8), StepSize(0, 0, 1, 5)], None),  # drafts and chunks
        ([StepSize(3), StepSize(2, is_eager=True)], None),
        ([StepSize(257), StepSize()], None),
        ([StepSize(256), StepSize(0, 0, 1, 512)], None),  # each one alone fits
        ([StepSize(1), StepSize(0, 0, 1, 513)], None),
        ([StepSize(65), StepSize(1, 1)], None),  # drafts of up to 64 decodes are captured
    ],
)
def test_shared_bucket_holds_the_steps_of_all_engines(
    steps: list[StepSize], expected: BucketSize | None
) -> None:
    decodes = (1, 2, 4, 8, 64, 256)
    sizes = bucket_sizes(decodes, 512, 64) + draft_sizes(decodes, 4, 256)
    finder = BucketFinder([size for size in sizes if not size.no_shared_prefix])
    assert finder.find_shared(steps) == finder.find_shared(steps[::-1]) == expected


def test_step_with_prompt_logprobs_is_eager(make_runner: Callable[..., LocalRunner]) -> None:
    runner = make_runner()
    limits = runner.resolved.limits
    plan = largest_step(limits, len(runner.resolved.cache_groups)).plan
    num_tokens = limits.max_num_tokens
    assert runner.step_size(plan) == StepSize(0, 0, plan.num_rows, num_tokens)
    zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    scored = replace(plan, prompt_targets=PromptTargets(zero, zero, one, 1, zero))
    assert runner.step_size(scored) == StepSize(0, 0, plan.num_rows, num_tokens, is_eager=True)


def test_padding_of_all_engines_is_found() -> None:
    size = BucketSize(3, 2, 4, num_draft_tokens=2)  # five tokens of decodes, then four of chunks
    counts = np.array([5, 4, 2, 1, 0, 0], np.int32)
    expected = [[0] * 9, [0, 0, 1, 1, 1, 0, 1, 1, 1], [1] * 9]
    found = SharedPadding(size, torch.from_numpy(counts)).find()
    assert found.view(3, 9).int().tolist() == expected
