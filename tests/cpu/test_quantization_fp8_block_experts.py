"""FP8 experts with block-wise scales: the op, and checkpoints compared with transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fine_grained import SIZES, quantized, stacked_experts, store, values
from process_pool import RankBuild
from process_pool import Sizes as ProcessSizes
from quantized_build import (
    SPECS,
    TOKENS,
    QuantizedBuild,
    UnquantizedExperts,
    checkpoint_logits,
    logprob_errors,
    relative,
    transformers_logits,
)
from safetensors.torch import load_file, save_file
from tiny_families import save_reference
from tokenspeed_quantization.schemes import FP8_BLOCK
from torch import Tensor

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_kernels import inputs
from tokenspeed_kernels.reference import fp8_block, moe_w8a8
from tokenspeed_models.layers import Experts
from tokenspeed_models.weights import WeightMap

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


def test_experts_multiply_the_stored_values() -> None:
    problem = {
        "num_experts": 4,
        "top_k": 2,
        "hidden_size": 144,
        "intermediate_size": 128,
        "dtype": "float32",
    }
    given = inputs.moe_experts_fp8_block(
        problem, 9, torch.device("cpu"), torch.Generator().manual_seed(1), strided=True
    )
    found = moe_w8a8.moe_experts_fp8_block(problem)(*given.values())
    weights = {
        name: torch.stack(
            [
                codes.double() * fp8_block.spread_blocks(scale, *codes.shape).double()
                for codes, scale in zip(given[name], given[f"{name}_scale"], strict=True)
            ]
        )
        for name in ("gate_up", "down")
    }

    def rounded(x: Tensor) -> Tensor:
        codes, scale = quantized(torch.nn.functional.pad(x[None].float(), (0, -len(x) % 128)), 1)
        return values(codes, scale)[0, : len(x)].double()

    for token, x in enumerate(given["x"]):
        total = torch.zeros(144).double()
        routes = zip(given["ids"][token].tolist(), given["weights"][token].tolist(), strict=True)
        for expert, weight in routes:
            if expert == 4:  # no expert
                continue
            gate, up = (weights["gate_up"][expert] @ rounded(x)).chunk(2)
            hidden = torch.nn.functional.silu(gate) * up
            total += weight * (weights["down"][expert] @ rounded(hidden))
        torch.testing.assert_close(found[token].double(), total, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="80 is not a multiple of 128"):
        moe_w8a8.moe_experts_fp8_block({**problem, "intermediate_size": 80})


def test_checkpoint_with_experts_equals_transformers(tmp_path: Path) -> None:
    reference = save_reference("Qwen3Moe", tmp_path, **{**SIZES, **EXPERTS})
    store(tmp_path, reference)
    dequantized = transformers_logits(reference)
    found = checkpoint_logits(SPECS["Qwen3Moe"], tmp_path, UnquantizedExperts())
    assert relative(found, dequantized) < 1e-5
    settings: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True}
    with LLM(str(tmp_path), max_total_tokens=256, **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
        answer = llm.generate([{"prompt_token_ids": TOKENS}], params)[0].outputs[0]
        (planned,) = llm.kernel_plan.find("moe_experts_fp8_block")
        assert planned.backend == "torch"
    quantized_too = checkpoint_logits(SPECS["Qwen3Moe"], tmp_path, QuantizedBuild(FP8_BLOCK))
    assert 0.01 < relative(quantized_too, dequantized) < 0.2
    assert answer.logprobs is not None
    # The order of sums, which depends on the processor, decides how activations near a tie are rounded to FP8.
    assert logprob_errors(answer.logprobs, quantized_too[-1:]).max() < 0.1
    assert logprob_errors(answer.logprobs, dequantized[-1:]).max() > 0.2


def stack(tensors: dict[str, Tensor], experts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint with stacked instead of single experts."""
    others = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    assert others.keys() < tensors.keys()
    return {**others, **experts}


def test_stacked_experts_of_transformers_equal_single_experts(tmp_path: Path) -> None:
    reference = save_reference("Qwen3Moe", tmp_path, **{**SIZES, **EXPERTS})
    experts = stacked_experts(reference)
    tensors = store(tmp_path, reference)
    single = checkpoint_logits(SPECS["Qwen3Moe"], tmp_path, QuantizedBuild(FP8_BLOCK))
    assert "model.layers.1.mlp.experts.gate_up_proj_scale_inv" in experts
    save_file(stack(tensors, experts), tmp_path / "model.safetensors")
    found = checkpoint_logits(SPECS["Qwen3Moe"], tmp_path, QuantizedBuild(FP8_BLOCK))
    assert torch.equal(found, single)


@pytest.mark.parametrize(
    "sizes",
    [ProcessSizes(moe=2), ProcessSizes(experts=2), ProcessSizes(moe=2, experts=2)],
    ids=str,
)
def test_stacked_experts_are_divided_like_single_experts(
    sizes: ProcessSizes, tmp_path: Path
) -> None:
    changes = {**EXPERTS, "moe_intermediate_size": 256, "num_hidden_layers": 1}
    reference = save_reference("Qwen3Moe", tmp_path, **{**SIZES, **changes, "mlp_only_layers": []})
    stacked, layer = stacked_experts(reference), "model.layers.0.mlp."
    tensors = store(tmp_path, reference)
    single = {name: each for name, each in tensors.items() if name.startswith(f"{layer}experts.")}

    def load(rank: int, given: dict[str, Tensor]) -> Tensor:
        build = RankBuild(sizes.layout(rank))
        build.schemes = lambda name: FP8_BLOCK
        shape = {"num_experts": 4, "top_k": 2, "hidden_size": 256, "intermediate_size": 256}
        experts = Experts(build, **shape)
        WeightMap(experts.slots(layer), groups=build.group).load(given.items())
        operands = [each.float() for each in experts._operands if each is not None]
        return torch.cat([each.flatten() for each in operands])

    loaded = [load(rank, single) for rank in range(sizes.layout(0).world_size)]
    for rank, expected in enumerate(loaded):
        assert torch.equal(load(rank, stacked), expected)
    assert not torch.equal(loaded[0], loaded[1])


def test_missing_scale_of_stacked_experts_is_named(tmp_path: Path) -> None:
    reference = save_reference("Qwen3Moe", tmp_path, **{**SIZES, **EXPERTS})
    experts = stacked_experts(reference)
    name = "model.layers.1.mlp.experts.down_proj_scale_inv"
    tensors = store(tmp_path, reference)
    del experts[name]
    save_file(stack(tensors, experts), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"missing: {name}\. "):
        checkpoint_logits(SPECS["Qwen3Moe"], tmp_path, QuantizedBuild(FP8_BLOCK))


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda scale: None, f"missing: {EXPERT}"),
        (lambda scale: scale[:, :1], rf"{EXPERT} has shape \[1, 1\], expected \[1, 2\]"),
    ],
    ids=["missing", "truncated"],
)
def test_wrong_scale_of_an_expert_is_named(
    change: Callable[[Tensor], Tensor | None], message: str, tmp_path: Path
) -> None:
    store(tmp_path, save_reference("Qwen3Moe", tmp_path, **{**SIZES, **EXPERTS}))
    tensors = load_file(tmp_path / "model.safetensors")
    changed = change(tensors.pop(EXPERT))
    if changed is not None:
        tensors[EXPERT] = changed
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        checkpoint_logits(SPECS["Qwen3Moe"], tmp_path, QuantizedBuild(FP8_BLOCK))
