"""Draft models on a CUDA device give the outputs of steps without draft tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenspeed_demo.items import held_out_set
from tokenspeed_demo.render import TEMPLATE, Renderer
from tokenspeed_testing.drafts import FixedDepth

from tokenspeed_core import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MTP = {"method": "mtp", "num_speculative_tokens": 3}
EAGLE3 = {"method": "eagle3", "model": "demo-eagle3", "num_speculative_tokens": 5}
ITSELF = {"method": "draft_model", "model": "demo", "num_speculative_tokens": 3}
DEEPSEEK = {"method": "draft_model", "model": "demo-deepseek", "num_speculative_tokens": 2}
PARAMS = (
    SamplingParams(temperature=0, max_tokens=64),
    SamplingParams(temperature=0.8, seed=3, max_tokens=64),
)


def answers(model: str, **settings: Any) -> tuple[list[list[int]], Any]:
    """Return the answers to 48 prompts, each greedy and drawn, and the engine's counters."""
    tokenizer, renderer = Tokenizer.from_file(str(TEMPLATE.parent / "tokenizer.json")), Renderer()
    prompts = [
        {"prompt_token_ids": tokenizer.encode(renderer.prompt(item), add_special_tokens=False).ids}
        for task in ("edit", "copy", "tool_call", "sum_three_digits")
        for item in held_out_set(task, 12)
        for _ in PARAMS
    ]
    given = {"max_num_seqs": 16, "chunked_prefill_size": 512, "max_total_tokens": 32768}
    with LLM(model=model, dtype="float32", device="cuda", **given, **settings) as llm:
        params = list(PARAMS) * (len(prompts) // len(PARAMS))
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in outputs], llm.stats()


@pytest.mark.parametrize(
    ("model", "drafter", "least"),
    [
        ("demo-deepseek", MTP, 0.85),
        ("demo", EAGLE3, 0.85),
        ("demo", ITSELF, 0.97),
        ("demo", DEEPSEEK, 0.9),
    ],
    ids=["mtp", "eagle3", "itself", "other model"],
)
def test_draft_model_changes_no_answer(
    model: str, drafter: dict[str, Any], least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to rounding, which may change a choice between almost equal logits."""
    monkeypatch.setattr(
        "tokenspeed_core.engine.drafting.AdaptiveDepth", lambda num_seqs, most: FixedDepth(most)
    )
    expected, _ = answers(model)
    found, stats = answers(model, speculative_config=drafter)
    num_equal = sum(want == got for want, got in zip(expected, found, strict=True))
    share = stats.num_accepted[0] / stats.num_draft_rows
    per_step = 1 + stats.num_saved_steps / stats.num_draft_rows
    print(f"{num_equal} of {len(expected)} equal, {per_step:.2f} tokens a step, first {share:.3f}")
    assert num_equal >= 0.95 * len(expected)
    assert share >= least
    assert stats.num_held_pages == stats.num_pending_pages == 0


def test_depth_follows_the_measured_times() -> None:
    expected, _ = answers("demo-deepseek")
    found, stats = answers("demo-deepseek", speculative_config=MTP)
    num_equal = sum(want == got for want, got in zip(expected, found, strict=True))
    assert num_equal >= 0.95 * len(expected)
    assert stats.num_held_pages == 0
