"""An EAGLE-3 draft head for training (arXiv:2503.01840), under the names of published checkpoints.

Row i of the head combines the target's hidden states at token i with the embedding of token i + 1, and predicts token
i + 2. To draft further, row i + 1 takes the head's own output of row i instead of the target's hidden states. Training
unrolls this for several steps ("training-time test").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .model import MLP, ModelConfig, Qwen3, rotate
from .unrolled import Cache, attend_unrolled, unrolled_mask


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Sizes under the names of config.json. `layers` are the target's layers whose outputs the head reads."""

    vocab_size: int
    hidden_size: int
    draft_vocab_size: int = 1024
    intermediate_size: int = 512
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    layers: tuple[int, int, int] = (1, 2, 3)

    def to_json(self) -> dict[str, Any]:
        """The contents of config.json."""
        sizes = asdict(self)
        layers = sizes.pop("layers")
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **sizes,
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(layers),
                "use_aux_hidden_state": True,
            },
        }


class Attention(nn.Module):
    """Attention over the rows of the first step and the own rows of the later ones."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.num_groups = config.num_attention_heads // config.num_key_value_heads
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, cache: Cache) -> Tensor:
        """x [S, T, 2 * hidden]; mask and cache are as in `attend_unrolled`."""
        heads = (*x.shape[:2], -1, self.head_dim)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        q = rotate(self.q_proj(x).view(heads).transpose(1, 2), cos, sin).to(v.dtype)
        k = rotate(self.k_proj(x).view(heads).transpose(1, 2), cos, sin).to(v.dtype)
        k, v = (each.repeat_interleave(self.num_groups, dim=1) for each in (k, v))
        out = attend_unrolled(q, k, v, mask, cache)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def forward(
        self,
        embeds: Tensor,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor,
        cache: Cache,
    ) -> Tensor:
        both = torch.cat((self.input_layernorm(embeds), self.hidden_norm(x)), dim=-1)
        x = x + self.self_attn(both, *rotary, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Eagle3(nn.Module):
    """A draft head of one layer, with the token embedding of its target.

    `d2t` [draft_vocab_size] is the distance from each draft id to its id in the target's vocabulary, and `t2d`
    [vocab_size] tells which of the target's ids have one.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config, token_ids: Sequence[int]) -> None:
        """`token_ids` are the target's ids that the head can draft, ascending."""
        super().__init__()
        hidden = config.hidden_size
        self.config = config
        self.fc = nn.Linear(len(config.layers) * hidden, hidden, bias=False)
        self.midlayer = Layer(config)
        self.norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        ids = torch.tensor(token_ids)
        self.register_buffer("d2t", ids - torch.arange(len(ids)))
        self.register_buffer("t2d", torch.isin(torch.arange(config.vocab_size), ids))

    @property
    def token_ids(self) -> Tensor:
        """The target's ids, int64 [draft_vocab_size]."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @torch.no_grad()
    def start_from(self, target: Qwen3) -> None:
        """Start as a head that applies the target's norm and output head to the highest layer it reads."""
        hidden = self.config.hidden_size
        for parameter in self.midlayer.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        nn.init.zeros_(self.midlayer.self_attn.o_proj.weight)
        nn.init.zeros_(self.midlayer.mlp.down_proj.weight)
        nn.init.normal_(self.fc.weight, std=0.002)
        self.fc.weight[:, -hidden:] += torch.eye(hidden)
        self.norm.weight.copy_(target.model.norm.weight)
        self.lm_head.weight.copy_(target.model.embed_tokens.weight[self.token_ids])

    def forward(
        self,
        features: Tensor,
        embeds: Tensor,
        rotary: tuple[Tensor, Tensor],
        documents: Tensor,
        num_steps: int,
    ) -> list[Tensor]:
        """Return the logits [S, T, draft_vocab_size] of each step.

        `features` [S, T, 3 * hidden] are the target's hidden states, and `embeds` [S, T, hidden] the embeddings of the
        next tokens. Rows of different `documents` [S, T] do not see each other. The first n rows of a document have no
        meaning in step n.
        """
        x = self.fc(features)
        cache: Cache = []
        logits = []
        for step in range(num_steps):
            x = self.midlayer(embeds, x, rotary, unrolled_mask(documents, step), cache)
            logits.append(self.lm_head(self.norm(x)))
            x = x.roll(1, dims=1)
        return logits

    def checkpoint(self) -> dict[str, Tensor]:
        """The weights under the published names, without the target's embedding."""
        return {
            name: value if name in ("d2t", "t2d") else value.to(torch.bfloat16)
            for name, value in self.state_dict().items()
        }


def target_config(config: ModelConfig, **sizes: Any) -> Eagle3Config:
    """Return the configuration of a head for a target."""
    return Eagle3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        max_position_embeddings=config.max_position_embeddings,
        rope_theta=config.rope_theta,
        **sizes,
    )
