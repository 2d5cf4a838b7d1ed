"""OLMo 2 (arXiv:2501.00656) and OLMo 3: norms after the blocks of a layer, and of all query and key heads together.

OLMo 3 has windows in three of four layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tokenspeed_core.api import BuildContext
from tokenspeed_models.config import DecoderConfig
from tokenspeed_models.layers import (
    MLP,
    AllHeadNorm,
    Attention,
    CausalLM,
    Embedding,
    ModuleBuild,
    OutputHead,
    PostNormDecoderLayer,
    RMSNorm,
    rotary_table,
)
from tokenspeed_models_olmo.describe import OlmoConfig, read_olmo2, read_olmo3


class OlmoModel(CausalLM):
    """A model of either generation."""

    def __init__(self, c: OlmoConfig, build: BuildContext) -> None:
        d = c.decoder
        full = rotary_table(d.rope, build.device, build.max_model_len)
        is_shared = c.local_rope == d.rope
        local = full if is_shared else rotary_table(c.local_rope, build.device, build.max_model_len)
        layers = [
            _layer(d, build, layer, local if d.windows[layer] else full)
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


def _layer(
    d: DecoderConfig, build: BuildContext, layer: int, cos_sin: torch.Tensor
) -> PostNormDecoderLayer:
    attention = Attention(
        ModuleBuild(build, f"model.layers.{layer}.self_attn"),
        layer=layer,
        hidden_size=d.hidden_size,
        num_heads=d.num_heads,
        num_kv_heads=d.num_kv_heads,
        head_size=d.head_size,
        cos_sin=cos_sin,
        qkv_bias=d.qkv_bias,
        out_bias=d.out_bias,
        qk_norm=AllHeadNorm(build, d.num_heads, d.num_kv_heads, d.head_size, d.norm_eps),
        window=d.windows[layer],
        has_norm=False,
    )
    mlp = MLP(
        ModuleBuild(build, f"model.layers.{layer}.mlp"),
        d.hidden_size,
        d.intermediate_size,
        has_norm=False,
    )
    return PostNormDecoderLayer(
        attention,
        mlp,
        post_attention_norm=RMSNorm(build, d.hidden_size, d.norm_eps),
        post_mlp_norm=RMSNorm(build, d.hidden_size, d.norm_eps),
    )


class Olmo2ForCausalLM(OlmoModel):
    """`Olmo2ForCausalLM` checkpoints."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext) -> None:
        super().__init__(read_olmo2(config), build)


class Olmo3ForCausalLM(OlmoModel):
    """`Olmo3ForCausalLM` checkpoints."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext) -> None:
        super().__init__(read_olmo3(config), build)
