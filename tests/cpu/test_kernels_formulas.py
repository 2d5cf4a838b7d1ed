"""The reference kernels compared with transformers and with independent formulas."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from transformers import Qwen3MoeConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from tokenspeed_kernels.reference import activation, cache, moe, norm, rope
from tokenspeed_models.moe_config import RoutingConfig


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_rounds_like_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = Qwen3RMSNorm(96, eps=1e-5).to(dtype)
    torch.nn.init.normal_(module.weight)
    x, residual = torch.randn(2, 7, 96).to(dtype)
    problem = {"size": 96, "dtype": str(dtype).removeprefix("torch.")}
    close = {"rtol": 1e-6, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 0, "atol": 0}
    found = norm.rms_norm(problem)(x, module.weight.detach(), 1e-5)
    torch.testing.assert_close(found, module(x).detach(), **close)
    expected = residual + x
    y, returned = norm.add_rms_norm(problem)(x, residual, module.weight.detach(), 1e-5)
    assert returned is residual
    assert torch.equal(residual, expected)
    torch.testing.assert_close(y, module(expected).detach(), **close)


def table(num: int, rotary_size: int) -> torch.Tensor:
    angles = torch.arange(num)[:, None] / 10000 ** (
        torch.arange(rotary_size // 2) / (rotary_size // 2)
    )
    return torch.cat([angles.cos(), angles.sin()], dim=1)


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("rotary_size", [32, 16])
def test_rope_matches_transformers(is_packed: bool, rotary_size: int) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(5, 4 + 2 + 2, 32)
    q, k = qkv[:, :4], qkv[:, 4:6]
    if not is_packed:
        q, k = q.clone(), k.clone()
    cos_sin, positions = table(50, rotary_size), torch.tensor([0, 3, 49, 7, 7])
    cos, sin = (part.repeat(1, 2)[None] for part in cos_sin[positions].chunk(2, dim=1))
    turned = [x[..., :rotary_size].transpose(0, 1)[None] for x in (q, k)]
    expected = [x[0].transpose(0, 1).clone() for x in apply_rotary_pos_emb(*turned, cos, sin)]
    rest = [x[..., rotary_size:].clone() for x in (q, k)]
    v = qkv[:, 6:].clone()
    problem = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 32,
        "rotary_size": rotary_size,
        "dtype": "float32",
    }
    rope.rope(problem)(q, k, positions, cos_sin, False)
    for got, want, kept in zip((q, k), expected, rest, strict=True):
        torch.testing.assert_close(got[..., :rotary_size], want)
        assert torch.equal(got[..., rotary_size:], kept)
    assert torch.equal(qkv[:, 6:], v)


def test_interleaved_rope_rotates_complex_numbers() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(6, 3, 16), torch.randn(6, 1, 16)
    cos_sin, positions = table(20, 16), torch.arange(6) * 3
    cos, sin = cos_sin[positions].chunk(2, dim=1)
    factor = torch.complex(cos, sin)[:, None]
    expected = [
        torch.view_as_real(torch.view_as_complex(x.view(6, -1, 8, 2)) * factor).flatten(2)
        for x in (q, k)
    ]
    problem = {
        "num_heads": 3,
        "num_kv_heads": 1,
        "head_size": 16,
        "rotary_size": 16,
        "dtype": "float32",
    }
    rope.rope(problem)(q, k, positions, cos_sin, True)
    torch.testing.assert_close(q, expected[0])
    torch.testing.assert_close(k, expected[1])


@pytest.mark.parametrize("is_packed", [True, False])
def test_fused_norm_and_rope_match_separate_ops(is_packed: bool) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(5, 8, 32)
    q, k = qkv[:, :4], qkv[:, 4:6]
    if not is_packed:
        q, k = q.clone(), k.clone()
    q_weight, k_weight = torch.randn(2, 32)
    cos_sin, positions = table(50, 16), torch.arange(5)
    problem = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 32,
        "rotary_size": 16,
        "dtype": "float32",
    }
    one = norm.rms_norm({"size": 32, "dtype": "float32"})
    expected = one(q, q_weight, 1e-6), one(k, k_weight, 1e-6)
    rope.rope(problem)(*expected, positions, cos_sin, False)
    rope.qk_norm_rope(problem)(q, k, q_weight, k_weight, 1e-6, positions, cos_sin, False)
    torch.testing.assert_close(q, expected[0])
    torch.testing.assert_close(k, expected[1])


def test_silu_mul_gates_with_the_first_half() -> None:
    x = torch.tensor([[1.0, -2.0, 3.0, 5.0]])
    expected = [[3.0 / (1 + torch.e**-1), -10.0 / (1 + torch.e**2)]]
    torch.testing.assert_close(
        activation.silu_mul({"size": 2, "dtype": "float32"})(x), torch.tensor(expected)
    )


def test_gelu_tanh_mul_equals_transformers() -> None:
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(0)) * 3
    gate, up = x.chunk(2, dim=-1)
    found = activation.gelu_tanh_mul({"size": 12, "dtype": "float32"})(x)
    torch.testing.assert_close(found, ACT2FN["gelu_pytorch_tanh"](gate) * up)


def test_kv_write_skips_negative_slots() -> None:
    arena = torch.zeros(3, 2, 2, 4, 1, 2)
    k, v = torch.ones(3, 1, 2), 2 * torch.ones(3, 1, 2)
    write = cache.write_kv(
        {
            "num_kv_heads": 1,
            "head_size": 2,
            "block_size": 4,
            "kv_dtype": "float32",
            "dtype": "float32",
        }
    )
    write(k, v, arena[:, 1, 0], arena[:, 1, 1], torch.tensor([6, -1, 0]))
    assert arena.sum() == 2 * (2 + 4)
    assert arena[1, 1, 0, 2].eq(1).all()
    assert arena[0, 1, 1, 0].eq(2).all()


def test_moe_matches_transformers() -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=32,
        moe_intermediate_size=16,
        num_experts=6,
        num_experts_per_tok=3,
        norm_topk_prob=True,
    )
    block = Qwen3MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(1, 9, 32)
    with torch.no_grad():
        result = block(x)
        expected = result[0] if isinstance(result, tuple) else result
        logits = x[0] @ block.gate.weight.T
        problem = {
            "num_experts": 6,
            "top_k": 3,
            "hidden_size": 32,
            "intermediate_size": 16,
            "dtype": "float32",
        }
        routing = asdict(RoutingConfig(6, 3, renormalize=True))
        weights, ids = moe.moe_route({**routing, "dtype": "float32"})(logits, None)
        gate_up, down = block.experts.gate_up_proj, block.experts.down_proj
        found = moe.moe_experts(problem)(x[0], gate_up, down, weights, ids)
    torch.testing.assert_close(found, expected.view(9, 32), rtol=1e-5, atol=1e-5)
