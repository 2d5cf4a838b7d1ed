"""The Qwen3 architecture for training: parameter names and arithmetic are those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes under the names of config.json."""

    vocab_size: int = 1536
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 5
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    def to_json(self, eos_token_id: int, pad_token_id: int) -> dict[str, Any]:
        """The contents of config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **asdict(self),
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "eos_token_id": eos_token_id,
            "pad_token_id": pad_token_id,
        }


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [S, H, T, D] by cos and sin [S, 1, T, D], halves paired."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | Tensor) -> Tensor:
    """Attention of [S, H, T, D]. mask is a BlockMask, or bool [S, 1, T, T] with True where a query may look."""
    if isinstance(mask, BlockMask):
        out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        assert isinstance(out, Tensor)  # only return_lse makes it a tuple
        return out
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask | Tensor) -> Tensor:
        """x [S, T, hidden]; masks are as in `attend`."""
        heads = (*x.shape[:2], -1, self.head_dim)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        q = rotate(self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2), cos, sin).to(v.dtype)
        k = rotate(self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2), cos, sin).to(v.dtype)
        out = attend(q, k, v, mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask | Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Body(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class Qwen3(nn.Module):
    """A Qwen3 language model with tied embeddings."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.model = Body(config)
        inverse = config.rope_theta ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        self.register_buffer("_inverse", inverse, persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        for layer in self.model.layers:
            nn.init.zeros_(layer.self_attn.o_proj.weight)  # type: ignore[union-attr, arg-type]
            nn.init.zeros_(layer.mlp.down_proj.weight)  # type: ignore[union-attr, arg-type]

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: BlockMask | Tensor
    ) -> tuple[Tensor, ...]:
        """Logits [S, T, vocab] of the next token, for tokens and positions [S, T]."""
        *_, x = self.layer_outputs(tokens, positions, mask)
        return (self.logits(x),)

    def layer_outputs(
        self, tokens: Tensor, positions: Tensor, mask: BlockMask | Tensor
    ) -> Iterator[Tensor]:
        """The residual stream [S, T, hidden] after each layer."""
        cos, sin = self.rotary(positions)
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
            yield x

    def logits(self, x: Tensor) -> Tensor:
        """Logits [S, T, vocab] for the last layer's output [S, T, hidden]."""
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [S, 1, T, head_dim] of positions [S, T]."""
        angles = positions[:, None, :, None].float() * torch.cat((self._inverse, self._inverse))  # type: ignore[arg-type]
        return angles.cos(), angles.sin()

    def after_step(self) -> None:
        """Do nothing."""

    def checkpoint(self) -> dict[str, Tensor]:
        """The weights under the published names."""
        return self.state_dict()
