"""Qwen3-MoE: like Qwen3, with a mixture of experts instead of the MLP in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenspeed_core.api import BuildContext
from tokenspeed_models.config import DecoderConfig
from tokenspeed_models.describe import read_qwen3_moe
from tokenspeed_models.layers import (
    MLP,
    Attention,
    CausalLM,
    DecoderLayer,
    MoE,
    build_for_module,
    rotary_table,
)


class Qwen3MoeForCausalLM(CausalLM):
    """`Qwen3MoeForCausalLM` checkpoints."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext) -> None:
        c = read_qwen3_moe(config)
        cos_sin = rotary_table(c.rope, build.device)
        layers = [
            DecoderLayer(
                build,
                c.hidden_size,
                c.norm_eps,
                Attention(
                    build_for_module(build, config, layer, "self_attn"),
                    layer=layer,
                    hidden_size=c.hidden_size,
                    num_heads=c.num_heads,
                    num_kv_heads=c.num_kv_heads,
                    head_size=c.head_size,
                    cos_sin=cos_sin,
                    qkv_bias=c.qkv_bias,
                    out_bias=c.out_bias,
                    qk_norm_eps=c.norm_eps,
                    window=c.windows[layer],
                ),
                _mlp(c, layer, build, config),
            )
            for layer in build.each_layer(c.num_layers)
        ]
        super().__init__(
            build,
            layers,
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            norm_eps=c.norm_eps,
            tie_embeddings=c.tie_embeddings,
        )


def _mlp(c: DecoderConfig, layer: int, build: BuildContext, config: Mapping[str, Any]) -> MLP | MoE:
    """Return the experts of a layer, or its MLP if it is dense."""
    if c.moe is None or layer not in c.moe.layers:
        return MLP(
            build_for_module(build, config, layer, "mlp"), c.hidden_size, c.intermediate_size
        )
    build = build_for_module(build, config, layer, "mlp", num_experts=c.moe.num_experts)
    return MoE(
        build,
        c.hidden_size,
        c.moe.intermediate_size,
        num_experts=c.moe.num_experts,
        top_k=c.moe.num_experts_per_token,
        renormalize=c.moe.renormalize,
    )
