"""Absorbed MLA decode against transformers, which expands keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

from tokenspeed_kernels.reference.mla import mla_decode

HEADS, LATENT, ROPE, NOPE, VALUE, HIDDEN = 4, 32, 16, 24, 20, 96
LENGTHS, BLOCK_SIZE = (21, 1, 16, 40), 8
SIZES = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": 28,
    "kv_lora_rank": LATENT,
    "qk_rope_head_dim": ROPE,
    "qk_nope_head_dim": NOPE,
    "v_head_dim": VALUE,
    "head_dim": ROPE,
    "attn_implementation": "eager",
    "max_position_embeddings": 64,
}


def randomized(module: nn.Module) -> nn.Module:
    """Randomize every parameter, including norm weights."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=1.0 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5)
    return module.eval()


def causal(length: int) -> Tensor:
    return torch.full((1, 1, length, length), float("-inf")).triu(1)


def projected(module: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries and rotary queries [n, H, *], normalized latents and rotary keys [n, *] of a sequence."""
    q = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden))).unflatten(-1, (HEADS, -1))
    latent, k_rope = module.kv_a_proj_with_mqa(hidden).split((LATENT, ROPE), dim=-1)
    return *q.split((NOPE, ROPE), dim=-1), module.kv_a_layernorm(latent), k_rope


def rotated_v2(config: DeepseekV2Config, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Any]:
    angles = v2.DeepseekV2RotaryEmbedding(config)(q, torch.arange(q.shape[2])[None])
    return *v2.apply_rotary_emb(q, k, angles), angles


def rotated_v3(config: DeepseekV3Config, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Any]:
    angles = v3.DeepseekV3RotaryEmbedding(config)(q, torch.arange(q.shape[2])[None])
    return *v3.apply_rotary_pos_emb_interleave(q, k, *angles), angles


@pytest.mark.parametrize(
    ("config", "attention", "rotated"),
    [
        (DeepseekV2Config(**SIZES), v2.DeepseekV2Attention, rotated_v2),
        (DeepseekV3Config(**SIZES), v3.DeepseekV3Attention, rotated_v3),
    ],
    ids=["DeepSeek-V2", "DeepSeek-V3"],
)
def test_absorbed_mla_decode_matches_transformers(
    config: Any,
    attention: type[nn.Module],
    rotated: Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor, Any]],
) -> None:
    torch.manual_seed(0)
    module = randomized(attention(config, layer_idx=0))
    up_k, up_v = module.kv_b_proj.weight.unflatten(0, (HEADS, NOPE + VALUE)).split(
        (NOPE, VALUE), dim=1
    )
    blocks = iter(torch.randperm(16).tolist())
    cache = torch.full((16, BLOCK_SIZE, LATENT + ROPE), float("nan"))
    table = torch.full((len(LENGTHS), 6), -1, dtype=torch.int32)
    queries, expected = [], []
    for row, length in enumerate(LENGTHS):
        hidden = torch.randn(length, HIDDEN)
        q, q_rope, latent, k_rope = projected(module, hidden)
        q_rope, k_rope, angles = rotated(config, q_rope.transpose(0, 1)[None], k_rope[None, None])
        attended = module(
            hidden_states=hidden[None], position_embeddings=angles, attention_mask=causal(length)
        )[0]
        expected.append(attended[0, -1])
        queries.append(
            torch.cat([torch.einsum("hd,hdl->hl", q[-1], up_k), q_rope[0, :, -1]], dim=-1)
        )
        for index, part in enumerate(torch.cat([latent, k_rope[0, 0]], dim=-1).split(BLOCK_SIZE)):
            table[row, index] = block = next(blocks)
            cache[block, : part.shape[0]] = part
    problem = {
        "phase": "decode",
        "num_heads": HEADS,
        "latent_size": LATENT,
        "rope_size": ROPE,
        "block_size": BLOCK_SIZE,
        "dtype": "float32",
        "kv_dtype": "float32",
    }
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    y = mla_decode(problem)(
        torch.stack(queries), cache, table, lengths, max(LENGTHS), module.scaling
    )
    found = module.o_proj(torch.einsum("thl,hvl->thv", y, up_v).flatten(1))
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-5)


SMALL = {
    "num_heads": 3,
    "latent_size": 8,
    "rope_size": 4,
    "block_size": 4,
    "dtype": "float32",
    "kv_dtype": "float32",
}


def test_reference_matches_explicit_attention() -> None:
    torch.manual_seed(0)
    cache, q = torch.randn(5, 4, 12), torch.randn(2, 3, 12)
    table, lengths = (
        torch.tensor([[4, 0], [2, 1]], dtype=torch.int32),
        torch.tensor([6, 3], dtype=torch.int32),
    )
    y = mla_decode(SMALL)(q, cache, table, lengths, 6, 0.5)
    for row, entries in enumerate((torch.cat([cache[4], cache[0]])[:6], cache[2][:3])):
        for head in range(3):
            weights = torch.stack([q[row, head] @ entry * 0.5 for entry in entries]).exp()
            expected = (
                sum(weight * entry[:8] for weight, entry in zip(weights, entries, strict=True))
                / weights.sum()
            )
            torch.testing.assert_close(y[row, head], expected)


def test_reference_ignores_unwritten_entries() -> None:
    cache = torch.full((3, 4, 12), float("nan"))
    cache[1, :2] = 1.0
    table = torch.tensor([[1, -1, 99], [-1, -1, -1]], dtype=torch.int32)
    y = mla_decode(SMALL)(
        torch.ones(2, 3, 12), cache, table, torch.tensor([2, 0], dtype=torch.int32), 12, 1.0
    )
    assert torch.equal(y[0], torch.ones(3, 8))
    assert torch.equal(y[1], torch.zeros(3, 8))
