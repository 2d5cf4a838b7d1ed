"""Tokens of a prompt see later ones: greedy tokens equal those that transformers generates."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from test_greedy_tokens import ANY, prompts
from tiny_models import WINDOWS, save_reference
from tokenspeed_models_transformers.describe import describe

from tokenspeed_core import LLM, SamplingParams

pytestmark = pytest.mark.slow
pytest.importorskip("tokenspeed_kernels")

NUM_TOKENS = 12
BIDIRECTIONAL = {"use_bidirectional_attention": True}


@pytest.mark.parametrize(
    ("model_type", "changes", "settings", "has_types"),
    [
        ("granite", {"is_causal": False}, {}, False),
        ("gemma3_text", {**WINDOWS, "sliding_window": 16, **BIDIRECTIONAL}, ANY, False),
        ("hrm_text", {"prefix_lm": True, "initializer_range": 0.1}, {}, True),
    ],
)
def test_tokens_equal_transformers(
    model_type: str,
    changes: dict[str, Any],
    settings: dict[str, Any],
    has_types: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = save_reference(model_type, tmp_path, **changes)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
    with LLM(
        str(tmp_path),
        device="cpu",
        skip_tokenizer_init=True,
        max_total_tokens=512,
        max_model_len=64,
        block_size=4,
        **settings,
    ) as llm:
        scheduler: Any = llm._engine.scheduler
        plan, num_steps = scheduler.plan, count()

        def preempt_and_plan(*arguments: Any) -> Any:
            decoding = scheduler.columns.decoding()
            if next(num_steps) % 3 == 2 and len(decoding):
                scheduler.preempt(int(decoding[-1]))
            return plan(*arguments)

        monkeypatch.setattr(scheduler, "plan", preempt_and_plan)
        outputs = llm.generate([{"prompt_token_ids": each} for each in prompts()], params)
        assert scheduler.num_preemptions > 2
    for prompt, output in zip(prompts(), outputs, strict=True):
        ids = torch.tensor([prompt])
        types = {"token_type_ids": torch.ones_like(ids)} if has_types else {}
        found = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
            **types,
        )
        (got,) = output.outputs
        assert list(got.token_ids) == found.sequences[0, len(prompt) :].tolist()
        for token, logits, entry in zip(got.token_ids, found.logits, got.logprobs, strict=True):
            expected = logits[0].log_softmax(dim=-1)[token].item()
            assert entry[token].logprob == pytest.approx(expected, abs=1e-4)


def test_description_says_so() -> None:
    from test_describe import config_of

    assert describe(config_of("granite", is_causal=False)).is_bidirectional
    assert not describe(config_of("granite")).is_bidirectional
