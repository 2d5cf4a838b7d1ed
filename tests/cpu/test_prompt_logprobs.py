"""Log-probabilities of prompt tokens, compared with transformers on the demo checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
import transformers

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.api.step import StepPlan
from tokenspeed_core.worker import prompt_scores

PROMPTS = [[5, 6, 7, 8] * 9, list(range(3, 40)), [11], [12, 13]]
DEMO = Path(str(import_module("tokenspeed_demo").__file__)).parent / "checkpoint"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    # Small chunks and few logits at a time, so that prompts are scored in many parts.
    with (
        pytest.MonkeyPatch.context() as patched,
        LLM(dtype="float32", chunked_prefill_size=16, max_model_len=128, max_num_seqs=4) as made,
    ):
        patched.setattr(prompt_scores, "MAX_LOGITS", 7 * made._inputs.limits.vocab_size)
        yield made


@pytest.fixture(scope="module")
def oracle() -> list[torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([ids])).logits[0].log_softmax(-1) for ids in PROMPTS]


def test_prompt_logprobs_equal_those_of_transformers(llm: LLM, oracle: list[torch.Tensor]) -> None:
    params = [
        SamplingParams(prompt_logprobs=each, temperature=0, max_tokens=3) for each in (0, 2, 5, 1)
    ]
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    for _ in range(2):  # the second time, the prefixes are in the cache
        for output, each, expected in zip(
            llm.generate(prompts, params), params, oracle, strict=True
        ):
            ids, entries = output.prompt_token_ids, output.prompt_logprobs
            assert entries is not None and len(entries) == len(ids)
            assert entries[0] is None
            assert output.num_cached_tokens == 0
            for position, entry in enumerate(entries[1:]):
                assert entry is not None
                row, token = expected[position], ids[position + 1]
                assert entry[token].logprob == pytest.approx(row[token].item(), abs=1e-4)
                assert entry[token].rank == int((row > row[token]).sum()) + 1
                top = row.topk(each.prompt_logprobs or 1)
                assert len(entry) in (each.prompt_logprobs, (each.prompt_logprobs or 0) + 1)
                for value, rank in zip(
                    top.values.tolist(), range(1, (each.prompt_logprobs or 0) + 1), strict=False
                ):
                    found = [e.logprob for e in entry.values() if e.rank == rank]
                    assert found == pytest.approx([value] * len(found), abs=1e-4)


def test_scoring_does_not_change_the_output(llm: LLM) -> None:
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    plain = SamplingParams(temperature=0, max_tokens=5, logprobs=2)
    scored = plain.model_copy(update={"prompt_logprobs": 1})
    expected = [output.outputs for output in llm.generate(prompts, plain)]
    mixed = llm.generate(prompts, [plain, scored, plain, scored])
    assert [[s.token_ids for s in output.outputs] for output in mixed] == [
        [s.token_ids for s in outputs] for outputs in expected
    ]
    assert [output.prompt_logprobs is None for output in mixed] == [True, False, True, False]


def test_other_sequences_of_a_request_use_the_cache(llm: LLM) -> None:
    planned = 0
    forward = llm._engine.runner.forward

    def counting(plan: StepPlan) -> None:
        nonlocal planned
        if plan.prompt_targets is not None:
            planned += len(plan.prompt_targets.token_ids)
        forward(plan)

    params = SamplingParams(prompt_logprobs=0, n=3, max_tokens=1, temperature=0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(llm._engine.runner, "forward", counting)
        (output,) = llm.generate({"prompt_token_ids": PROMPTS[0]}, params)
    assert planned == len(PROMPTS[0]) - 1
    assert len(output.outputs) == 3


def test_no_output_tokens_only_scores_the_prompt(llm: LLM, oracle: list[torch.Tensor]) -> None:
    ids = list(range(128))  # fills the context
    params = SamplingParams(prompt_logprobs=0, max_tokens=0)
    full, short = llm.generate(
        [{"prompt_token_ids": ids}, {"prompt_token_ids": PROMPTS[0]}], params
    )
    assert full.outputs[0].token_ids == [] and full.outputs[0].finish_reason == "length"
    assert full.prompt_logprobs is not None and len(full.prompt_logprobs) == 128
    assert short.prompt_logprobs is not None
    last = short.prompt_logprobs[-1]
    assert last is not None
    assert last[8].logprob == pytest.approx(oracle[0][-2][8].item(), abs=1e-4)
