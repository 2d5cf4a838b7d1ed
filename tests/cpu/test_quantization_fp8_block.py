"""FP8 with block-wise scales, compared with transformers: ops, layers, models and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fine_grained import SIZES, quantize_inputs, quantized, store, values
from quantized_build import (
    SPECS,
    TOKENS,
    QuantizedBuild,
    UnquantizedActivations,
    checkpoint_logits,
    logprob_errors,
    normal,
    relative,
    transformers_logits,
)
from safetensors.torch import load_file, save_file
from tiny_families import save_reference
from tokenspeed_quantization.schemes import FP8_BLOCK
from tokenspeed_server.dry_run import dry_run
from tokenspeed_server.settings import ServerConfig
from torch import Tensor

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.errors import CheckpointError
from tokenspeed_kernels.reference import fp8_block
from tokenspeed_models.layers import Linear, Projection
from tokenspeed_models.weights import WeightMap

FAMILIES = [("Llama", torch.float32), ("Qwen2", torch.float32), ("Qwen3", torch.bfloat16)]


def test_values_and_scales_equal_transformers() -> None:
    x = normal(256, 384) * torch.logspace(-3, 2, 384)
    for rows, quantize in ((128, fp8_block.quantize_blocks), (1, fp8_block.quantize_groups)):
        found, scale = quantize(x)
        expected, expected_scale = quantized(x, rows)
        torch.testing.assert_close(scale, expected_scale, rtol=1e-6, atol=0)
        same = found.view(torch.uint8) == expected.view(torch.uint8)
        # ties may be rounded in either direction
        assert same.float().mean() > 0.999


def test_blocks_and_groups_have_their_own_scales() -> None:
    weight = torch.zeros(200, 300)
    weight[150, 290], weight[3, 130] = -448.0, 4.48
    stored, scale = fp8_block.quantize_blocks(weight)
    torch.testing.assert_close(scale[1, 2], torch.tensor(1.0))
    torch.testing.assert_close(scale[0, 1], torch.tensor(0.01))
    torch.testing.assert_close(stored.float() * fp8_block.spread_blocks(scale, 200, 300), weight)
    x = torch.ones(2, 200)
    x[1, 190] = 448.0
    _, scale = fp8_block.quantize_groups(x)
    torch.testing.assert_close(scale, torch.tensor([[1 / 448, 1 / 448], [1 / 448, 1.0]]))


def test_linear_multiplies_the_stored_values() -> None:
    x, bias = normal(7, 256), normal(384, seed=2)
    weight = normal(384, 256, seed=1) * torch.logspace(-2, 1, 256)
    (x8, x_scale), (w8, w_scale) = quantized(x, rows=1), quantized(weight)
    problem = {"in_size": 256, "out_size": 384, "dtype": "float32"}
    found = fp8_block.linear_fp8_block(problem)(x8, x_scale, w8, w_scale, bias)
    exact = values(x8, x_scale).double() @ values(w8, w_scale).double().T + bias.double()
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)
    assert 0.005 < relative(exact, x.double() @ weight.double().T + bias.double()) < 0.05


def test_linear_layer_has_a_scale_per_block() -> None:
    sizes = {"a": 256, "b": 128, "c": 60}
    projections = tuple(Projection(name, size, None) for name, size in sizes.items())
    build = QuantizedBuild(FP8_BLOCK, torch.bfloat16)
    linear = Linear(build, 256, projections, bias=True)
    assert linear.weight.dtype == torch.float8_e4m3fn
    assert linear.scale is not None
    assert linear.scale.shape == (4, 2)
    weights = [normal(size, 256, seed=size) * size for size in sizes.values()]
    stored = {}
    for name, weight in zip(sizes, weights, strict=True):
        stored[f"p.{name}.weight"] = weight
        stored[f"p.{name}.bias"] = torch.zeros(weight.shape[0])
    WeightMap(linear.slots("p.")).load(stored.items())
    expected = torch.cat(weights).to(torch.bfloat16).float()
    found = linear.weight.float() * fp8_block.spread_blocks(linear.scale, 444, 256)
    assert relative(found, expected) < 0.04
    x = normal(3, 256, seed=5).to(torch.bfloat16)
    assert relative(linear(x).float(), x.float() @ expected.T) < 0.06


def test_projections_that_share_a_block_are_refused() -> None:
    projections = Projection("q", 192, None), Projection("k", 64, None)
    with pytest.raises(ValueError, match=r"--quantization fp8-block: k .* 192 .* 128"):
        Linear(QuantizedBuild(FP8_BLOCK), 256, projections)


@pytest.mark.parametrize(("family", "scale_dtype"), FAMILIES)
def test_logits_equal_transformers(family: str, scale_dtype: torch.dtype, tmp_path: Path) -> None:
    reference = save_reference(family, tmp_path, **SIZES)
    original = transformers_logits(reference)
    store(tmp_path, reference, scale_dtype)
    dequantized = transformers_logits(reference)
    assert relative(original, dequantized) > 0.01
    found = checkpoint_logits(SPECS[family], tmp_path, UnquantizedActivations())
    assert relative(found, dequantized) < 1e-5

    quantize_inputs(reference)
    expected = transformers_logits(reference)
    found = checkpoint_logits(SPECS[family], tmp_path, QuantizedBuild(FP8_BLOCK))
    assert min(relative(*rows) for rows in zip(found, expected, strict=True)) < 2e-5
    # A tie may be rounded in either direction, and later values depend on it.
    assert relative(found, expected) < 0.25 * relative(expected, dequantized)
    assert 0.01 < relative(found, dequantized) < 0.2


def test_served_logprobs_equal_transformers(tmp_path: Path) -> None:
    reference = save_reference("Llama", tmp_path, **SIZES)
    store(tmp_path, reference)
    quantize_inputs(reference)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=5, ignore_eos=True)
    ops = (
        "quantize_fp8_groups",
        "add_rms_norm_fp8_groups",
        "silu_mul_fp8_groups",
        "linear_fp8_block",
    )
    with LLM(
        str(tmp_path), device="cpu", skip_tokenizer_init=True, max_total_tokens=512, max_num_seqs=2
    ) as llm:
        answer = llm.generate([{"prompt_token_ids": TOKENS}], params)[0].outputs[0]
        for op in ops:
            assert {planned.backend for planned in llm.kernel_plan.find(op)} == {"torch"}
    logits = transformers_logits(reference, TOKENS + list(answer.token_ids))
    assert answer.logprobs is not None
    errors = logprob_errors(answer.logprobs, logits[len(TOKENS) - 1 : -1])
    # With one token per step other values are ties.
    assert errors.max() < 0.15
    assert errors.mean() < 0.04


def test_quantizing_on_load_equals_the_stored_checkpoint(tmp_path: Path) -> None:
    reference = save_reference("Llama", tmp_path, **SIZES)
    found = checkpoint_logits(SPECS["Llama"], tmp_path, QuantizedBuild(FP8_BLOCK))
    store(tmp_path, reference)
    expected = checkpoint_logits(SPECS["Llama"], tmp_path, QuantizedBuild(FP8_BLOCK))
    assert relative(found, expected) < 0.01


def test_engine_quantizes_on_load(tmp_path: Path) -> None:
    save_reference("Llama", tmp_path, **SIZES)
    settings: dict[str, Any] = {
        "quantization": "fp8-block",
        "device": "cpu",
        "skip_tokenizer_init": True,
    }
    report = dry_run(ServerConfig.from_keywords(model=str(tmp_path), **settings))
    assert "quantization: fp8-block" in report
    assert "linear_fp8_block" in report
    with LLM(str(tmp_path), load_format="dummy", max_total_tokens=256, **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        answer = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params)[0].outputs[0]
    assert len(answer.token_ids) == 3


NAME = "model.layers.1.self_attn.q_proj.weight_scale_inv"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda scale: None, f"missing: {NAME}"),
        (lambda scale: scale[:1], rf"{NAME} has shape \[1, 2\]"),
        (lambda scale: scale.flatten(), rf"{NAME} has shape \[4\]"),
        (lambda scale: scale.to(torch.float8_e5m2), f"{NAME} is torch.float8_e5m2"),
    ],
    ids=["missing", "truncated", "flat", "8-bit"],
)
def test_error_names_the_invalid_scale(
    change: Callable[[Tensor], Tensor | None], message: str, tmp_path: Path
) -> None:
    store(tmp_path, save_reference("Llama", tmp_path, **SIZES))
    tensors = load_file(tmp_path / "model.safetensors")
    changed = change(tensors.pop(NAME))
    if changed is not None:
        tensors[NAME] = changed
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        LLM(str(tmp_path), device="cpu", skip_tokenizer_init=True)
