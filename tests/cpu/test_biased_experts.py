"""Experts with biases and a clamped SwiGLU, compared with transformers' gpt-oss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from tokenspeed_kernels.reference.biased_experts import (
    dequantize_mxfp4,
    moe_biased_experts,
    moe_biased_experts_mxfp4,
)

SIZES = {"num_experts": 4, "top_k": 2, "hidden_size": 64, "intermediate_size": 32}
PROBLEM: dict[str, Any] = {**SIZES, "alpha": 1.3, "limit": 0.8, "dtype": "float32"}


def random_mxfp4(*shape: int) -> tuple[Tensor, Tensor]:
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8)
    return codes, torch.randint(122, 126, (*shape[:-1], shape[-1] // 32), dtype=torch.uint8)


def test_every_code_has_the_value_of_transformers() -> None:
    torch.manual_seed(0)
    codes, scale = random_mxfp4(3, 40, 96)
    blocks = codes.view(3, 40, 3, 16)
    expected = convert_moe_packed_tensors(blocks, scale, dtype=torch.float32)
    assert set(codes.flatten().tolist()) == set(range(256))
    assert torch.equal(dequantize_mxfp4(codes, scale), expected.transpose(1, 2))


@pytest.mark.parametrize("is_quantized", [False, True])
def test_experts_equal_transformers(is_quantized: bool) -> None:
    torch.manual_seed(0)
    config = GptOssConfig(
        num_local_experts=4,
        hidden_size=64,
        intermediate_size=32,
        swiglu_alpha=PROBLEM["alpha"],
        swiglu_limit=PROBLEM["limit"],
    )
    module = GptOssExperts(config)
    codes = {"gate_up": random_mxfp4(4, 64, 64), "down": random_mxfp4(4, 64, 32)}
    values = {name: dequantize_mxfp4(*each) / 4 for name, each in codes.items()}
    if is_quantized:
        codes = {name: (each, scale - 2) for name, (each, scale) in codes.items()}
    biases = torch.randn(4, 64), torch.randn(4, 64)
    x, weights = torch.randn(9, 64), torch.rand(9, 2)
    ids = torch.rand(9, 4).argsort(dim=1)[:, :2]
    with torch.no_grad():
        module.gate_up_proj.copy_(values["gate_up"].transpose(1, 2))
        module.down_proj.copy_(values["down"].transpose(1, 2))
        module.gate_up_proj_bias.copy_(biases[0])
        module.down_proj_bias.copy_(biases[1])
        expected = module(x, ids, weights)
    routing = weights, ids.int()
    if is_quantized:
        run = moe_biased_experts_mxfp4(PROBLEM)
        found = run(x, *codes["gate_up"], biases[0], *codes["down"], biases[1], *routing)
    else:
        run_plain = moe_biased_experts(PROBLEM)
        found = run_plain(x, values["gate_up"], biases[0], values["down"], biases[1], *routing)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
