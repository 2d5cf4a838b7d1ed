"""DeepSeek V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437): latent attention, then an MLP or experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers import (
    MLP,
    CausalLM,
    DecoderLayer,
    Embedding,
    ModuleBuild,
    MoE,
    MultiHeadLatentAttention,
    MultiTokenPredictor,
    OutputHead,
    RMSNorm,
    rotary_table,
)
from tokenspeed_models_deepseek.describe import (
    DeepseekConfig,
    glm4_moe_lite_config,
    read_v2,
    read_v3,
    text_config,
)

Json = Mapping[str, Any]
_TEXT = "language_model."  # begins the names of the language model's weights in Kimi K2.5


class DeepseekModel(CausalLM):
    """A model of either generation. `prefix` is the prefix of linear layers' names in the checkpoint."""

    def __init__(self, c: DeepseekConfig, build: BuildContext, prefix: str = "") -> None:
        cos_sin = rotary_table(c.rope, build.device, build.max_model_len)
        layers = [
            DecoderLayer(
                build,
                c.hidden_size,
                c.norm_eps,
                _attention(c, build, layer, f"{prefix}model.layers.{layer}", cos_sin),
                _mlp(c, build, layer, f"{prefix}model.layers.{layer}"),
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
            num_draft_layers=c.num_draft_layers,
        )


def _attention(
    c: DeepseekConfig, build: BuildContext, layer: int, name: str, cos_sin: torch.Tensor
) -> MultiHeadLatentAttention:
    return MultiHeadLatentAttention(
        ModuleBuild(build, f"{name}.self_attn"),
        layer=layer,
        hidden_size=c.hidden_size,
        sizes=c.sizes,
        query_rank=c.query_rank,
        scale=c.scale,
        cos_sin=cos_sin,
        is_interleaved=c.is_interleaved,
        bias=c.has_attention_bias,
    )


def _mlp(c: DeepseekConfig, build: BuildContext, layer: int, name: str) -> MLP | MoE:
    """Return the experts of a layer, or its MLP if it is dense. Layers for multi-token prediction are sparse."""
    module = ModuleBuild(build, f"{name}.mlp")
    if layer in c.moe.layers or layer >= c.num_layers:
        return MoE(module, c.hidden_size, c.moe)
    return MLP(module, c.hidden_size, c.intermediate_size)


class DeepseekMTP(MultiTokenPredictor):
    """The first layer for multi-token prediction of a checkpoint. `config` has DeepSeek-V3's keys."""

    def __init__(self, config: Json, build: BuildContext, target: DeepseekModel) -> None:
        c = read_v3(config)
        name = f"model.layers.{c.num_layers}"
        cos_sin = rotary_table(c.rope, build.device, build.max_model_len)
        (layer,) = [
            DecoderLayer(
                build,
                c.hidden_size,
                c.norm_eps,
                _attention(c, build, index, name, cos_sin),
                _mlp(c, build, c.num_layers, name),
            )
            for index in build.each_layer(1)
        ]
        super().__init__(
            build, target, layer, name=name, hidden_size=c.hidden_size, norm_eps=c.norm_eps
        )


class DeepseekV2ForCausalLM(DeepseekModel):
    """DeepSeek-V2, V2-Lite and V2.5 checkpoints."""

    def __init__(self, config: Json, build: BuildContext) -> None:
        super().__init__(read_v2(config), build)


class DeepseekV3ForCausalLM(DeepseekModel):
    """DeepSeek-V3, R1 and V3.1, and Kimi K2 checkpoints."""

    def __init__(self, config: Json, build: BuildContext) -> None:
        super().__init__(read_v3(config), build)


class Glm4MoeLiteForCausalLM(DeepseekModel):
    """GLM-4.7-Flash checkpoints."""

    def __init__(self, config: Json, build: BuildContext) -> None:
        super().__init__(read_v3(glm4_moe_lite_config(config)), build)


class KimiK25ForConditionalGeneration(DeepseekModel):
    """The language model of Kimi K2.5 checkpoints. Their vision tower and projector are not read."""

    def __init__(self, config: Json, build: BuildContext) -> None:
        super().__init__(read_v3(text_config(config)), build, _TEXT)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the weights of the language model. Raises ValueError as `CausalLM.load_weights` does."""
        super().load_weights(
            (name.removeprefix(_TEXT), tensor)
            for name, tensor in weights
            if name.startswith((_TEXT, "model.", "lm_head."))
        )
