"""Quantized checkpoints of models that run through transformers, against the weights that they mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fine_grained
import pytest
import torch
from integer_checkpoints import SIZES, Stored, store
from quantized_build import TOKENS, logprob_errors, relative, transformers_logits
from quantized_forms import QUANTIZED_INPUTS, WEIGHT_ONLY, logits, quantize_inputs
from safetensors.torch import load_file, save_file
from tiny_families import save_reference
from tokenspeed_models_mistral import MIXTRAL
from tokenspeed_models_transformers import TRANSFORMERS

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.errors import CheckpointError

EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
OPTIONS: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "max_total_tokens": 256}


@pytest.mark.parametrize(
    ("form", "family", "sizes"),
    [
        ("awq", "Qwen3", {}),
        ("gptq desc_act", "StableLm", {}),  # linear layers that are not part of a larger module
        ("W4A16", "Qwen3Moe", EXPERTS),
        ("MXFP4A16", "Olmoe", {**EXPERTS, "intermediate_size": 32}),
    ],
)
def test_weight_only_logits_equal_transformers(
    form: str, family: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    settings, quantize = WEIGHT_ONLY[form]
    reference = save_reference(family, tmp_path, **{**SIZES, **sizes})
    original = transformers_logits(reference)
    store(tmp_path, reference, settings, quantize)
    expected = transformers_logits(reference)
    assert relative(original, expected) > 0.01
    found = logits(tmp_path, settings, TRANSFORMERS)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["W8A8", "FP8 static", "FP8 dynamic"])
def test_logits_with_quantized_inputs_equal_transformers(form: str, tmp_path: Path) -> None:
    settings, quantize, round_values = QUANTIZED_INPUTS[form]
    reference = save_reference("Qwen3", tmp_path, **SIZES)
    store(tmp_path, reference, settings, quantize)
    dequantized = transformers_logits(reference)
    quantize_inputs(reference, round_values)
    expected = transformers_logits(reference)
    found = logits(tmp_path, settings, TRANSFORMERS)
    assert relative(found, expected) < 0.3 * relative(expected, dequantized)


def test_block_wise_fp8_experts_equal_those_of_the_family(tmp_path: Path) -> None:
    sizes = {**fine_grained.SIZES, "num_local_experts": 3, "intermediate_size": 128}
    reference = save_reference("Mixtral", tmp_path, **sizes)
    settings = {**fine_grained.STORED, "modules_to_not_convert": ["gate"]}
    fine_grained.store(tmp_path, reference, settings=settings)
    found, expected = (logits(tmp_path, settings, spec) for spec in (TRANSFORMERS, MIXTRAL))
    assert relative(found, expected) < 0.01
    assert 0.01 < relative(found, transformers_logits(reference)) < 0.2
    with LLM(str(tmp_path), hf_overrides={"architectures": ["*"]}, **OPTIONS) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=3)
        answer = llm.generate([{"prompt_token_ids": TOKENS}], params)[0].outputs[0]
        assert len(llm.kernel_plan.find("moe_experts_fp8_block")) == 1
    assert answer.logprobs is not None
    assert logprob_errors(answer.logprobs, found[-1:]).max() < 0.05


@pytest.mark.parametrize(
    ("method", "op"), [("fp8", "moe_experts_fp8"), ("w8a8_int8", "moe_experts_int8")]
)
def test_unquantized_checkpoint_is_quantized_on_load(method: str, op: str, tmp_path: Path) -> None:
    reference = save_reference("Olmoe", tmp_path, **{**SIZES, **EXPERTS})
    with LLM(str(tmp_path), quantization=method, **OPTIONS) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=3)
        answer = llm.generate([{"prompt_token_ids": TOKENS}], params)[0].outputs[0]
        assert len(llm.kernel_plan.find(op)) == 1
    assert answer.logprobs is not None
    assert logprob_errors(answer.logprobs, transformers_logits(reference)[-1:]).max() < 0.3


EXPERT = "model.layers.1.mlp.experts.2.up_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{EXPERT}.weight_scale"), f"missing: {EXPERT}.weight_scale"),
        (
            lambda t: [t.pop(name) for name in list(t) if name.startswith(f"{EXPERT}.")],
            f"missing: {EXPERT}.weight_packed, {EXPERT}.weight_scale",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.gate.weight": torch.ones(4, 64)}),
            r"model.layers.1.mlp.gate.weight has shape \[4, 64\], expected \[3, 64\]",
        ),
    ],
    ids=["scale", "expert", "router"],
)
def test_bad_checkpoint_is_named(
    change: Callable[[Stored], Any], message: str, tmp_path: Path
) -> None:
    settings, quantize = WEIGHT_ONLY["W4A16"]
    reference = save_reference("Olmoe", tmp_path, **{**SIZES, **EXPERTS, "intermediate_size": 32})
    store(tmp_path, reference, settings, quantize)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        LLM(str(tmp_path), **OPTIONS)


def test_unsupported_quantized_experts_are_named(tmp_path: Path) -> None:
    settings, quantize = WEIGHT_ONLY["W4A16"]
    sizes = {**SIZES, **EXPERTS, "intermediate_size": 32, "hidden_act": "gelu"}
    store(tmp_path, save_reference("Olmoe", tmp_path, **sizes), settings, quantize)
    with pytest.raises(CheckpointError, match=r"model.layers.0.mlp.experts \(OlmoeExperts\)"):
        LLM(str(tmp_path), **OPTIONS)
