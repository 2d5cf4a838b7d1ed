"""gpt-oss (arXiv:2508.10925): attention with sinks, alternately windowed and full, and experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers import (
    Attention,
    CausalLM,
    DecoderLayer,
    Embedding,
    ModuleBuild,
    MoE,
    OutputHead,
    RMSNorm,
    rotary_table,
)
from tokenspeed_models_gpt_oss.describe import GptOssConfig, read_gpt_oss
from tokenspeed_models_gpt_oss.experts import GptOssExperts


class GptOssForCausalLM(CausalLM):
    """`GptOssForCausalLM` checkpoints."""

    renames: Mapping[str, str] = {".mlp.gate.": ".mlp.router."}

    def __init__(self, config: Mapping[str, Any], build: BuildContext) -> None:
        c = read_gpt_oss(config)
        d = c.decoder
        cos_sin = rotary_table(d.rope, build.device, build.max_model_len)
        layers = [
            DecoderLayer(
                build,
                d.hidden_size,
                d.norm_eps,
                Attention(
                    ModuleBuild(build, f"model.layers.{layer}.self_attn"),
                    layer=layer,
                    hidden_size=d.hidden_size,
                    num_heads=d.num_heads,
                    num_kv_heads=d.num_kv_heads,
                    head_size=d.head_size,
                    cos_sin=cos_sin,
                    qkv_bias=d.qkv_bias,
                    out_bias=d.out_bias,
                    window=d.windows[layer],
                    has_sinks=True,
                ),
                _moe(ModuleBuild(build, f"model.layers.{layer}.mlp"), c),
            )
            for layer in build.each_layer(d.num_layers)
        ]
        embedding = Embedding(build, d.vocab_size, d.hidden_size)
        super().__init__(
            build,
            layers,
            embedding=embedding,
            norm=RMSNorm(build, d.hidden_size, d.norm_eps),
            head=OutputHead(
                build, d.vocab_size, d.hidden_size, embedding if d.tie_embeddings else None
            ),
        )


def _moe(build: BuildContext, c: GptOssConfig) -> MoE:
    return MoE(build, c.decoder.hidden_size, c.moe, GptOssExperts(build, c))
