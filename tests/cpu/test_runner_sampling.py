"""Sampling in the worker: biases, masks, log-probabilities and seeds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenspeed_testing.plans import PlanMaker

from tokenspeed_core.api.step import LateInputs, StepResult
from tokenspeed_core.worker.local import LocalRunner

VOCAB = 97
PROMPT = [5, 9, 5, 33, 60, 61]


def reference_logprobs(runner: LocalRunner, tokens: list[int]) -> torch.Tensor:
    """Return the log-softmax [VOCAB] after `tokens`, from a top list of the whole vocabulary."""
    runner.forget()
    maker = PlanMaker(runner.block_size)
    maker.add("x", tokens, 0, logprobs=VOCAB)
    result = maker.step(runner, chunks={"x": len(tokens)})
    assert result.logprobs is not None
    values = torch.empty(VOCAB)
    values[torch.from_numpy(result.logprobs.top_ids.astype(np.int64))] = torch.from_numpy(
        result.logprobs.top_values
    )
    runner.forget()
    return values


def generate(
    runner: LocalRunner, count: int, prompt: list[int] = PROMPT, **params: object
) -> list[int]:
    runner.forget()
    maker = PlanMaker(runner.block_size)
    maker.add("x", prompt, 3, **params)  # type: ignore[arg-type]
    maker.step(runner, chunks={"x": len(prompt)})
    for _ in range(count - 1):
        maker.step(runner, decodes=["x"])
    return maker.sequences["x"].output


def test_bias_ends_with_its_sequence(
    runner: LocalRunner,
) -> None:
    plain = generate(runner, 3)
    runner.forget()
    maker = PlanMaker(runner.block_size)
    for name, bias in (("biased", {42: 100.0}), ("plain", {})):
        maker.add(name, PROMPT, 2, bias=bias)
        maker.step(runner, chunks={name: len(PROMPT)})
        for _ in range(2):
            maker.step(runner, decodes=[name])
        expected = [42, 42, 42] if name == "biased" else plain
        assert maker.sequences[name].output == expected
        maker.drop(name)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidden_ends_come_after_their_number_of_tokens(
    runner: LocalRunner, temperature: float
) -> None:
    params = {"temperature": temperature, "seed": 7}
    plain = generate(runner, 6, **params)
    for number in (1, 3, 6):
        ends = (plain[0], *range(40, 60))
        tokens = generate(runner, 6, endless=(number, ends), **params)
        assert not {*tokens[:number]} & {*ends}
    # Biased to an end, the sequence ends at the first token that may.
    end = {plain[0]: 100.0}
    tokens = generate(runner, 6, bias=end, endless=(4, [plain[0]]), **params)
    assert plain[0] not in tokens[:4]
    assert tokens[4:] == [plain[0]] * 2


def test_forbidden_stop_tokens_affect_only_their_slots(runner: LocalRunner) -> None:
    plain = generate(runner, 4)
    runner.forget()
    maker = PlanMaker(runner.block_size)
    # The lists of ids grow, and a later sequence takes over a slot.
    for slot, ends in enumerate([(), [plain[0]], list(range(90)), (), [plain[0], plain[1]]]):
        name = str(slot)
        maker.add(name, PROMPT, slot % 4, endless=(2 if ends else 0, ends))
        maker.step(runner, chunks={name: len(PROMPT)})
        for _ in range(3):
            maker.step(runner, decodes=[name])
        tokens = maker.sequences[name].output
        assert not {*tokens[:2]} & {*ends}
        assert ends or tokens == plain
        if slot == 0:
            maker.drop(name)


def test_row_parameters_do_not_affect_other_rows(runner: LocalRunner) -> None:
    plain, drawn = generate(runner, 6), generate(runner, 6, temperature=1.0, seed=11, top_p=0.9)
    runner.forget()
    maker = PlanMaker(runner.block_size)
    names = {
        "plain": {},
        "drawn": {"temperature": 1.0, "seed": 11, "top_p": 0.9},
        "penalized": {"repetition_penalty": 2.0},
        "reported": {"logprobs": 3},
        "biased": {"bias": {1: 9.0}},
    }
    for slot, (name, params) in enumerate(names.items()):
        maker.add(name, PROMPT, slot, **params)  # type: ignore[arg-type]
    maker.step(runner, chunks={name: len(PROMPT) for name in names})
    for _ in range(5):
        maker.step(runner, decodes=list(names))
    assert maker.sequences["plain"].output == maker.sequences["reported"].output == plain
    assert maker.sequences["drawn"].output == drawn


def test_seeded_tokens_do_not_depend_on_the_batch(
    runner: LocalRunner,
) -> None:
    first = generate(runner, 8, temperature=0.8, seed=2**62, top_k=40)
    other = generate(runner, 8, temperature=0.8, seed=5, top_k=40)
    assert first != other
    runner.forget()
    maker = PlanMaker(runner.block_size)
    maker.add("other", PROMPT, 0, temperature=0.8, seed=5, top_k=40)
    maker.step(runner, chunks={"other": 6})
    maker.add("first", PROMPT, 1, temperature=0.8, seed=2**62, top_k=40)
    for size in (1, 3, 2):
        maker.step(runner, decodes=["other"], chunks={"first": size})
    for _ in range(7):
        maker.step(runner, decodes=["first", "other"])
    assert maker.sequences["first"].output == first
    assert maker.sequences["other"].output[:8] == other


def test_logprobs_come_from_the_raw_logits(runner: LocalRunner) -> None:
    runner.forget()
    maker = PlanMaker(runner.block_size)
    maker.add(
        "reported",
        PROMPT,
        0,
        logprobs=4,
        temperature=3.0,
        seed=1,
        bias={7: 50.0},
        presence_penalty=1.0,
    )
    maker.add("other", PROMPT, 1)
    result = maker.step(runner, chunks={"reported": 6, "other": 6})
    expected = reference_logprobs(runner, PROMPT)
    check_logprobs(result, expected, width=4)


def check_logprobs(result: StepResult, expected: torch.Tensor, width: int) -> None:
    assert result.logprobs is not None
    token = int(result.token_ids[0])
    assert result.logprobs.rows.tolist() == [0]
    assert result.logprobs.width == width
    assert float(expected.exp().sum()) == pytest.approx(1.0, abs=1e-5)
    assert result.logprobs.chosen[0] == pytest.approx(float(expected[token]), abs=1e-5)
    assert result.logprobs.ranks[0] == int((expected > expected[token]).sum()) + 1
    top = expected.topk(width)
    assert result.logprobs.top_ids.tolist() == top.indices.tolist()
    assert result.logprobs.top_values == pytest.approx(top.values.numpy(), abs=1e-5)


def test_narrower_top_lists_are_prefixes_of_the_widest(runner: LocalRunner) -> None:
    maker = PlanMaker(runner.block_size)
    maker.add("none", PROMPT, 0)
    maker.add("zero", PROMPT, 1, logprobs=0)
    maker.add("five", PROMPT, 2, logprobs=5)
    logprobs = maker.step(runner, chunks={"none": 6, "zero": 6, "five": 6}).logprobs
    assert logprobs is not None
    assert logprobs.rows.tolist() == [1, 2]
    assert logprobs.width == 5
    assert logprobs.top_ids[:5].tolist() == logprobs.top_ids[5:].tolist()


def pack_mask(allowed: list[int]) -> np.ndarray:  # type: ignore[type-arg]
    words = np.zeros(-(-VOCAB // 32), np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_late_mask_limits_only_its_row(runner: LocalRunner, temperature: float) -> None:
    plain = generate(runner, 1)
    runner.forget()
    maker = PlanMaker(runner.block_size)
    for slot, name in enumerate(("free", "bound", "single")):
        maker.add(name, PROMPT, slot, temperature=temperature if name != "free" else 0.0)
    plan = maker.plan(chunks={"free": 6, "bound": 6, "single": 6})
    runner.forward(plan)
    mask = np.concatenate((pack_mask([31, 63, 95, 96]), pack_mask([64])))
    runner.sample(plan.step_id, LateInputs(np.array([1, 2], np.int32), mask))
    maker.take(plan, runner.collect(plan.step_id))
    assert maker.sequences["free"].output == plain
    assert maker.sequences["bound"].output[0] in (31, 63, 95, 96)
    assert maker.sequences["single"].output == [64]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_without_finite_logits_gives_minus_one(runner: LocalRunner, temperature: float) -> None:
    plain = generate(runner, 2)
    runner.forget()
    maker = PlanMaker(runner.block_size)
    maker.add("bad", PROMPT, 0, temperature=temperature)
    maker.add("good", PROMPT, 1)
    for decodes, chunks in (((), {"bad": 6, "good": 6}), (("bad", "good"), {})):
        plan = maker.plan(decodes, chunks)
        runner.forward(plan)
        logits = runner._launched[plan.step_id].logits
        assert logits is not None
        with torch.inference_mode():
            logits[0] = float("nan")
        runner.sample(plan.step_id, None)
        result = runner.collect(plan.step_id)
        assert result.token_ids[0] == -1
        maker.take(plan, result)
    assert maker.sequences["good"].output == plain
