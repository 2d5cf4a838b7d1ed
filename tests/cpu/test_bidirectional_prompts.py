"""Tokens of a prompt see later ones: greedy tokens equal those that transformers generates."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from drafted import draft_in_every_step
from tokenspeed_models_gemma import GEMMA3
from tokenspeed_models_gemma.describe import describe_gemma3
from tokenspeed_testing.model import ModelConformance
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from tokenspeed_core import LLM, BadRequestError, SamplingParams, TokenSpeedError

VOCAB_SIZE = 101
NUM_NEW = 16
LENGTHS = (1, 2, 7, 18, 33, 40)
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "sliding_window": 16,  # 9 tokens on each side, the token's own included
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "use_bidirectional_attention": True,
}
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "block_size": 4,
    "max_num_seqs": 8,
    "max_model_len": 64,
    "max_total_tokens": 512,
}


@dataclass(frozen=True, slots=True)
class Reference:
    """The folder of a checkpoint, and the greedy tokens of transformers with log-probabilities [T, vocab], by prompt."""

    folder: str
    config: dict[str, Any]
    replies: dict[tuple[int, ...], tuple[list[int], torch.Tensor]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    torch.manual_seed(7)
    model = Gemma3ForCausalLM(Gemma3TextConfig(**CONFIG, attn_implementation="eager")).eval()
    folder = str(tmp_path_factory.mktemp("gemma3"))
    model.save_pretrained(folder)
    replies = {tuple(prompt): generate(model, prompt) for prompt in prompts()}
    return Reference(folder, model.config.to_dict(), replies)


def prompts() -> list[list[int]]:
    """Return prompts of several lengths; each is the beginning of the longest."""
    longest = np.random.default_rng(3).integers(3, VOCAB_SIZE, max(LENGTHS)).tolist()
    return [longest[:length] for length in LENGTHS]


def generate(model: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Return the greedy tokens of transformers, and log-probabilities [T, vocab]."""
    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NUM_NEW,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logprobs = torch.stack([each[0] for each in found.logits]).log_softmax(dim=-1)
    return found.sequences[0, len(prompt) :].tolist(), logprobs


def check(reference: Reference, llm: LLM) -> None:
    """Compare tokens and log-probabilities of all prompts, which run at once."""
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=3)
    for output in llm.generate([{"prompt_token_ids": each} for each in prompts()], params):
        tokens, logprobs = reference.replies[tuple(output.prompt_token_ids)]
        (found,) = output.outputs
        assert list(found.token_ids) == tokens
        assert found.logprobs is not None
        for expected, entry in zip(logprobs, found.logprobs, strict=True):
            for token, each in entry.items():
                assert each.logprob == pytest.approx(expected[token].item(), abs=1e-4)
        assert output.num_cached_tokens == 0


def test_tokens_equal_transformers(reference: Reference, caplog: pytest.LogCaptureFixture) -> None:
    assert describe_gemma3(reference.config).is_bidirectional
    with (
        caplog.at_level(logging.INFO, "tokenspeed.engine"),
        LLM(reference.folder, chunked_prefill_size=5, **SETTINGS) as llm,
    ):
        for _ in range(2):  # the second time, prefixes could be shared
            check(reference, llm)
        with pytest.raises(BadRequestError, match="prompt_logprobs"):
            llm.generate({"prompt_token_ids": [3, 4]}, SamplingParams(prompt_logprobs=1))
    lines = [record.getMessage() for record in caplog.records]
    assert any("one step" in each and "prefix caching" in each for each in lines)
    assert any("--chunked-prefill-size has no effect" in each for each in lines)


def test_preempted_sequences_keep_their_tokens(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a preemption, the prompt is computed as one, and the output causally."""
    with LLM(reference.folder, **SETTINGS) as llm:
        scheduler = llm._engine.scheduler
        plan, num_steps = scheduler.plan, count()

        def preempt_and_plan(*arguments: Any) -> Any:
            decoding = scheduler.columns.decoding()
            if next(num_steps) % 3 == 2 and len(decoding):
                scheduler.preempt(int(decoding[-1]))
            return plan(*arguments)

        monkeypatch.setattr(scheduler, "plan", preempt_and_plan)
        check(reference, llm)
        assert scheduler.num_preemptions > 3


def test_full_cache_preempts_and_keeps_tokens(reference: Reference) -> None:
    with LLM(reference.folder, **{**SETTINGS, "max_total_tokens": 72, "block_size": 2}) as llm:
        check(reference, llm)
        assert llm._engine.scheduler.num_preemptions


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_draft_tokens_change_nothing(
    reference: Reference, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_in_every_step(monkeypatch)
    speculation = {"method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        speculation["model"] = reference.folder
    with LLM(reference.folder, speculative_config=speculation, **SETTINGS) as llm:
        check(reference, llm)
        stats = llm.stats()
    assert stats.num_draft_tokens
    if method == "draft_model":  # it sees prompts as the target does
        assert sum(stats.num_accepted) > 0.9 * stats.num_draft_tokens


def test_bidirectional_drafter_of_a_causal_model_is_refused(reference: Reference) -> None:
    speculation = {"method": "draft_model", "num_speculative_tokens": 3, "model": reference.folder}
    overrides = {"use_bidirectional_attention": False}
    with pytest.raises(TokenSpeedError, match="bidirectional"):
        LLM(reference.folder, speculative_config=speculation, hf_overrides=overrides, **SETTINGS)


def test_causal_mask_would_be_noticed(reference: Reference) -> None:
    """The comparison above would notice a causal mask."""
    overrides = {"use_bidirectional_attention": False, "sliding_window": 9}
    with (
        LLM(reference.folder, hf_overrides=overrides, **SETTINGS) as llm,
        pytest.raises(AssertionError),
    ):
        check(reference, llm)


def test_conformance_kit_keeps_prompts_whole() -> None:
    config = {**CONFIG, "architectures": ["Gemma3ForCausalLM"]}
    suite = type("Suite", (ModelConformance,), {"spec": GEMMA3, "config": config})()
    suite.test_chunks_and_other_rows_do_not_change_tokens()
