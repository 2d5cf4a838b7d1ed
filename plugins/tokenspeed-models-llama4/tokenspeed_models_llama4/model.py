"""Llama 4: attention within chunks in most layers, without rotation in the others, and one expert per token.

Queries and keys are normalized after their rotation, which is the same as before it: the norm has no weights, and a
rotation keeps lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers import (
    MLP,
    Attention,
    CausalLM,
    DecoderLayer,
    Embedding,
    HeadNorm,
    ModuleBuild,
    MoE,
    OutputHead,
    RMSNorm,
    rotary_table,
)
from tokenspeed_models.weights import WeightSlot
from tokenspeed_models_llama4.describe import Llama4Config, read_llama4, read_llama4_multimodal

Json = Mapping[str, Any]


class UnitHeadNorm(HeadNorm):
    """Normalizes each head of queries and keys, without weights."""

    def __init__(self, build: BuildContext, head_size: int, eps: float) -> None:
        super().__init__(build, head_size, eps)
        for weight in self.operands[:2]:
            weight.fill_(1.0)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Return no slots."""
        yield from ()


class UnrotatedAttention(Attention):
    """Attention without positions, but with queries that grow with their position. `growth` is float32 [P]."""

    growth: torch.Tensor

    def attend(self, qkv: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the attention of all heads [T, heads * head_size] for `qkv` [T, out] at int64 positions [T]."""
        q, k, v = self.split(qkv)
        q = (q * self.growth.index_select(0, positions).view(-1, 1, 1)).to(q.dtype)
        return self._attend(q, k, v).flatten(1)


class ScaledInputMoE(MoE):
    """Experts that multiply their inputs, not their outputs, by the token's score."""

    def __call__(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [T, hidden] for the normalized x + residual [T, hidden], and that sum."""
        x, residual = norm.add(x, residual)
        scores, ids = self.router(x)
        result = self.run_experts((x * scores).to(x.dtype), torch.ones_like(scores), ids)
        assert self.shared is not None, "all layers with experts have a shared one"
        result += self.shared(x)
        return result, residual


class Llama4Model(CausalLM):
    """The language model. The names of its linear layers begin with `prefix` in the checkpoint."""

    renames: Mapping[str, str] = {
        ".mlp.gate.": ".feed_forward.router.",
        ".mlp.shared_experts.": ".feed_forward.shared_expert.",
        ".mlp.": ".feed_forward.",
    }

    def __init__(self, c: Llama4Config, build: BuildContext, prefix: str = "model.") -> None:
        d = c.decoder
        cos_sin = rotary_table(d.rope, build.device, build.max_model_len)
        growth = _growth(c, cos_sin)
        layers = [
            DecoderLayer(
                build,
                d.hidden_size,
                d.norm_eps,
                _attention(c, build, layer, f"{prefix}layers.{layer}", cos_sin, growth),
                self._feed_forward(c, build, layer, f"{prefix}layers.{layer}"),
            )
            for layer in build.each_layer(d.num_layers)
        ]
        embedding = Embedding(build, d.vocab_size, d.hidden_size)
        tied = embedding if d.tie_embeddings else None
        super().__init__(
            build,
            layers,
            embedding=embedding,
            norm=RMSNorm(build, d.hidden_size, d.norm_eps),
            head=OutputHead(build, d.vocab_size, d.hidden_size, tied),
        )

    def _feed_forward(
        self, c: Llama4Config, build: BuildContext, layer: int, name: str
    ) -> MLP | ScaledInputMoE:
        """Return the experts of a layer, or its MLP if it is dense."""
        module, d = ModuleBuild(build, f"{name}.mlp", self.renames), c.decoder
        if d.moe is not None and layer in d.moe.layers:
            return ScaledInputMoE(module, d.hidden_size, d.moe)
        return MLP(module, d.hidden_size, d.intermediate_size)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy a checkpoint's weights. Those of all experts together are stored with inputs before outputs."""
        super().load_weights(
            (name, tensor.transpose(1, 2) if _is_stacked(name) else tensor)
            for name, tensor in weights
        )


def _is_stacked(name: str) -> bool:
    return name.endswith(("experts.gate_up_proj", "experts.down_proj"))


def _growth(c: Llama4Config, cos_sin: torch.Tensor) -> torch.Tensor:
    """Return the factors of queries without rotation, float32 [P], for all positions of the rotary table."""
    positions = torch.arange(len(cos_sin), dtype=torch.float32, device=cos_sin.device)
    return torch.log1p(torch.floor((positions + 1) / c.floor_scale)) * c.attention_growth + 1


def _attention(
    c: Llama4Config,
    build: BuildContext,
    layer: int,
    name: str,
    cos_sin: torch.Tensor,
    growth: torch.Tensor,
) -> Attention:
    d = c.decoder
    is_rotated = c.has_rope[layer]
    has_norm = is_rotated and c.has_unit_norm
    attention = (Attention if is_rotated else UnrotatedAttention)(
        ModuleBuild(build, f"{name}.self_attn"),
        layer=layer,
        hidden_size=d.hidden_size,
        num_heads=d.num_heads,
        num_kv_heads=d.num_kv_heads,
        head_size=d.head_size,
        cos_sin=cos_sin if is_rotated else None,
        is_interleaved=True,
        qkv_bias=d.qkv_bias,
        out_bias=d.out_bias,
        qk_norm=UnitHeadNorm(build, d.head_size, d.norm_eps) if has_norm else None,
        window=d.windows[layer],
        is_chunked=d.windows[layer] is not None,
    )
    if isinstance(attention, UnrotatedAttention):
        attention.growth = growth
    return attention


class Llama4ForCausalLM(Llama4Model):
    """`Llama4ForCausalLM` checkpoints."""

    def __init__(self, config: Json, build: BuildContext) -> None:
        super().__init__(read_llama4(config), build)


class Llama4ForConditionalGeneration(Llama4Model):
    """The language model of `Llama4ForConditionalGeneration` checkpoints."""

    def __init__(self, config: Json, build: BuildContext) -> None:
        super().__init__(read_llama4_multimodal(config), build, "language_model.model.")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the weights of the language model. Vision weights are not read."""
        super().load_weights(
            (name.removeprefix("language_model."), tensor)
            for name, tensor in weights
            if not name.startswith(("vision_model.", "multi_modal_projector."))
        )
