"""Phi-3 (arXiv:2404.14219) and Phi-4: like Llama, with stacked projections, LongRoPE, and heads rotated in part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers import (
    MLP,
    Attention,
    CausalLM,
    DecoderLayer,
    Embedding,
    ModuleBuild,
    OutputHead,
    RMSNorm,
    rotary_table,
)
from tokenspeed_models_phi.describe import read_phi3


class Phi3ForCausalLM(CausalLM):
    """`Phi3ForCausalLM` checkpoints."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext) -> None:
        c = read_phi3(config)
        cos_sin = rotary_table(c.rope, build.device, build.max_model_len)
        layers = [
            DecoderLayer(
                build,
                c.hidden_size,
                c.norm_eps,
                Attention(
                    ModuleBuild(build, f"model.layers.{layer}.self_attn"),
                    layer=layer,
                    hidden_size=c.hidden_size,
                    num_heads=c.num_heads,
                    num_kv_heads=c.num_kv_heads,
                    head_size=c.head_size,
                    cos_sin=cos_sin,
                    window=c.windows[layer],
                    stacked_name="qkv_proj",
                ),
                MLP(
                    ModuleBuild(build, f"model.layers.{layer}.mlp"),
                    c.hidden_size,
                    c.intermediate_size,
                    stacked_name="gate_up_proj",
                ),
            )
            for layer in build.each_layer(c.num_layers)
        ]
        embedding = Embedding(build, c.vocab_size, c.hidden_size)
        tied = embedding if c.tie_embeddings else None
        super().__init__(
            build,
            layers,
            embedding=embedding,
            norm=RMSNorm(build, c.hidden_size, c.norm_eps),
            head=OutputHead(build, c.vocab_size, c.hidden_size, tied),
        )
