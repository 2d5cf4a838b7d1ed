"""Gemma 2 (arXiv:2408.00118) and Gemma 3 (arXiv:2503.19786): norms around both blocks of a layer, GeGLU, and windows in
most layers.

Gemma multiplies normalized values by one plus the norm weight, and embeddings by the root of the hidden size. Gemma 2
bounds attention scores and logits; Gemma 3 normalizes queries and keys instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers import (
    MLP,
    Attention,
    CausalLM,
    Embedding,
    HeadNorm,
    ModuleBuild,
    OutputHead,
    PostNormDecoderLayer,
    RMSNorm,
    rotary_table,
)
from tokenspeed_models_gemma.describe import (
    GemmaConfig,
    read_gemma2,
    read_gemma3,
    read_gemma3_multimodal,
)

Json = Mapping[str, Any]


class GemmaModel(CausalLM):
    """A model of either generation. `prefix` is the prefix of linear layers' names in the checkpoint."""

    def __init__(self, c: GemmaConfig, build: BuildContext, prefix: str = "model.") -> None:
        d = c.decoder
        full = rotary_table(d.rope, build.device, build.max_model_len)
        is_shared = c.local_rope == d.rope
        local = full if is_shared else rotary_table(c.local_rope, build.device, build.max_model_len)
        layers = [
            _layer(c, build, layer, f"{prefix}layers.{layer}", local if d.windows[layer] else full)
            for layer in build.each_layer(d.num_layers)
        ]
        embedding = Embedding(build, d.vocab_size, d.hidden_size, scale=d.hidden_size**0.5)
        tied = embedding if d.tie_embeddings else None
        super().__init__(
            build,
            layers,
            embedding=embedding,
            norm=RMSNorm(build, d.hidden_size, d.norm_eps, weight_offset=1.0),
            head=OutputHead(build, d.vocab_size, d.hidden_size, tied, soft_cap=c.logit_soft_cap),
        )


def _layer(
    c: GemmaConfig, build: BuildContext, layer: int, name: str, cos_sin: torch.Tensor
) -> PostNormDecoderLayer:
    d = c.decoder
    norm = partial(RMSNorm, build, d.hidden_size, d.norm_eps, weight_offset=1.0)
    attention = Attention(
        ModuleBuild(build, f"{name}.self_attn"),
        layer=layer,
        hidden_size=d.hidden_size,
        num_heads=d.num_heads,
        num_kv_heads=d.num_kv_heads,
        head_size=d.head_size,
        cos_sin=cos_sin,
        scale=c.attention_scale,
        soft_cap=c.attention_soft_cap,
        qkv_bias=d.qkv_bias,
        out_bias=d.out_bias,
        qk_norm=HeadNorm(build, d.head_size, d.norm_eps, weight_offset=1.0) if d.qk_norm else None,
        window=d.windows[layer],
        is_bidirectional=c.is_bidirectional,
    )
    mlp = MLP(
        ModuleBuild(build, f"{name}.mlp"),
        d.hidden_size,
        d.intermediate_size,
        activation="gelu_tanh",
    )
    return PostNormDecoderLayer(
        attention,
        mlp,
        input_norm=norm(),
        post_attention_norm=norm(),
        pre_mlp_norm=norm(),
        post_mlp_norm=norm(),
    )


class Gemma2ForCausalLM(GemmaModel):
    """`Gemma2ForCausalLM` checkpoints."""

    def __init__(self, config: Json, build: BuildContext) -> None:
        super().__init__(read_gemma2(config), build)


class Gemma3ForCausalLM(GemmaModel):
    """`Gemma3ForCausalLM` checkpoints."""

    def __init__(self, config: Json, build: BuildContext) -> None:
        super().__init__(read_gemma3(config), build)


class Gemma3ForConditionalGeneration(GemmaModel):
    """The language model of `Gemma3ForConditionalGeneration` checkpoints."""

    def __init__(self, config: Json, build: BuildContext) -> None:
        super().__init__(read_gemma3_multimodal(config), build, "language_model.model.")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the weights of the language model. Vision weights are not read.

        Published checkpoints begin the names with "language_model.", transformers 5 writes "model.language_model.".
        """
        named = ((_text_name(name), tensor) for name, tensor in weights)
        super().load_weights((name, tensor) for name, tensor in named if name is not None)


def _text_name(name: str) -> str | None:
    """Return a weight's name in a text checkpoint, or None for a weight of the vision encoder or projector."""
    if name.removeprefix("model.").startswith(("vision_tower.", "multi_modal_projector.")):
        return None
    if name.startswith("model.language_model."):
        return f"model.{name.removeprefix('model.language_model.')}"
    return name.removeprefix("language_model.")
