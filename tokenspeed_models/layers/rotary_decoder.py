"""The model that a `DecoderConfig` describes: rotary attention, then an MLP or experts in each layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tokenspeed_core.api import BuildContext
from tokenspeed_models.config import DecoderConfig
from tokenspeed_models.layers.attention import Attention
from tokenspeed_models.layers.causal_lm import CausalLM
from tokenspeed_models.layers.decoder import DecoderLayer
from tokenspeed_models.layers.embedding import Embedding, OutputHead
from tokenspeed_models.layers.mlp import MLP
from tokenspeed_models.layers.moe import MoE
from tokenspeed_models.layers.norm import RMSNorm
from tokenspeed_models.layers.qk_norm import AllHeadNorm, HeadNorm
from tokenspeed_models.layers.rotary import rotary_table
from tokenspeed_models.layers.scheme import ModuleBuild


class RotaryDecoder(CausalLM):
    """A causal language model without anything that `DecoderConfig` lacks. A family passes the config it has read."""

    def __init__(self, c: DecoderConfig, build: BuildContext) -> None:
        cos_sin = rotary_table(c.rope, build.device, build.max_model_len)
        layers = [
            rotary_layer(c, build, layer, f"model.layers.{layer}", cos_sin, self.renames)
            for layer in build.each_layer(c.num_layers)
        ]
        embedding = Embedding(build, c.vocab_size, c.hidden_size)
        super().__init__(
            build,
            layers,
            embedding=embedding,
            norm=RMSNorm(build, c.hidden_size, c.norm_eps),
            head=OutputHead(
                build, c.vocab_size, c.hidden_size, embedding if c.tie_embeddings else None
            ),
            num_draft_layers=c.num_draft_layers,
        )


def rotary_layer(
    c: DecoderConfig,
    build: BuildContext,
    layer: int,
    name: str,
    cos_sin: torch.Tensor,
    renames: Mapping[str, str],
) -> DecoderLayer:
    """Return layer number `layer` of a decoder. `name` is its name in the checkpoint, such as "model.layers.3"."""
    return DecoderLayer(
        build,
        c.hidden_size,
        c.norm_eps,
        _attention(c, build, layer, name, cos_sin),
        _mlp(c, layer, ModuleBuild(build, f"{name}.mlp", renames)),
    )


def _attention(
    c: DecoderConfig, build: BuildContext, layer: int, name: str, cos_sin: torch.Tensor
) -> Attention:
    return Attention(
        ModuleBuild(build, f"{name}.self_attn"),
        layer=layer,
        hidden_size=c.hidden_size,
        num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads,
        head_size=c.head_size,
        cos_sin=cos_sin,
        qkv_bias=c.qkv_bias,
        out_bias=c.out_bias,
        qk_norm=_qk_norm(c, build),
        window=c.windows[layer],
    )


def _qk_norm(c: DecoderConfig, build: BuildContext) -> HeadNorm | AllHeadNorm | None:
    if not c.qk_norm:
        return None
    if not c.is_qk_norm_joint:
        return HeadNorm(build, c.head_size, c.norm_eps)
    return AllHeadNorm(build, c.num_heads, c.num_kv_heads, c.head_size, c.norm_eps)


def _mlp(c: DecoderConfig, layer: int, module: ModuleBuild) -> MLP | MoE:
    """Return the experts of a layer, or its MLP if it is dense."""
    if c.moe is None or layer not in c.moe.layers:
        return MLP(
            module,
            c.hidden_size,
            c.intermediate_size,
            bias=c.mlp_bias,
        )
    return MoE(module, c.hidden_size, c.moe)
