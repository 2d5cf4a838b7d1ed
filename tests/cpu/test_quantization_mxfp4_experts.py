"""MXFP4 experts of compressed-tensors in every family with experts, against transformers with the dequantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from integer_checkpoints import Stored, store
from quantized_build import TOKENS, logprob_errors, relative, transformers_logits
from quantized_forms import WEIGHT_ONLY, logits
from tiny_families import save_reference
from tokenspeed_models_deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from tokenspeed_models_glm import GLM4_MOE
from tokenspeed_models_minimax import MINIMAX_M2
from tokenspeed_models_mistral import MIXTRAL
from tokenspeed_server.dry_run import dry_run
from tokenspeed_server.settings import ServerConfig

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_models.descriptors import QWEN3_MOE

FAMILIES: dict[str, Any] = {
    "Mixtral": MIXTRAL,
    "Glm4Moe": GLM4_MOE,
    "MiniMaxM2": MINIMAX_M2,
    "DeepseekV2": DEEPSEEK_V2,
    "DeepseekV3": DEEPSEEK_V3,
    "Qwen3Moe": QWEN3_MOE,
}
BY_DEFAULT = "Mixtral", "MiniMaxM2", "DeepseekV3"  # not only before releases
EXPERTS = r"\.experts\.\d+\."  # in the names of all experts but shared ones
OPTIONS: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True}


def save(family: str, folder: Path) -> tuple[dict[str, Any], Any, Stored]:
    """Write a checkpoint with MXFP4 experts; return its settings, transformers' model of its values, and its tensors."""
    size = "moe_intermediate_size"
    if family in ("Mixtral", "MiniMaxM2"):
        size = "intermediate_size"
    reference = save_reference(family, folder, **{size: 64})
    original = transformers_logits(reference)
    given, quantize = WEIGHT_ONLY["MXFP4A16"]
    group = {**given["config_groups"]["group_0"], "targets": [f"re:.*{EXPERTS}.*"]}
    settings = {**given, "config_groups": {"group_0": group}}
    stored = store(folder, reference, settings, quantize, EXPERTS)
    assert relative(original, transformers_logits(reference)) > 0.01
    return settings, reference, stored


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in BY_DEFAULT else pytest.mark.release)
        for family in FAMILIES
    ],
)
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    settings, reference, _ = save(family, tmp_path)
    found = logits(tmp_path, settings, FAMILIES[family])
    torch.testing.assert_close(found, transformers_logits(reference), rtol=1e-3, atol=1e-3)


@pytest.mark.release
def test_engine_serves_and_shows_the_experts(tmp_path: Path) -> None:
    _, reference, _ = save("Mixtral", tmp_path)
    report = dry_run(ServerConfig.from_keywords(model=str(tmp_path), **OPTIONS))
    assert "block_sparse_moe.experts.*.w1: mxfp4 (15 of them)" in report
    assert "moe_experts_mxfp4" in report
    with LLM(str(tmp_path), max_total_tokens=256, **OPTIONS) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, ignore_eos=True)
        answer = llm.generate([{"prompt_token_ids": TOKENS}], params)[0].outputs[0]
        (planned,) = llm.kernel_plan.find("moe_experts_mxfp4")
        assert planned.layers == (0, 1, 2)
    expected = transformers_logits(reference, TOKENS + list(answer.token_ids))[len(TOKENS) - 1 : -1]
    assert answer.logprobs is not None
    assert logprob_errors(answer.logprobs, expected).max() < 1e-2
