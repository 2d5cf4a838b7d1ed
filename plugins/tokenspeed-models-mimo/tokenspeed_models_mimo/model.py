"""MiMo-7B (arXiv:2505.07608): the layers of Qwen2, and a layer for multi-token prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers import (
    MultiTokenPredictor,
    RotaryDecoder,
    rotary_layer,
    rotary_table,
)
from tokenspeed_models_mimo.describe import draft_layer, read_mimo


class MiMoForCausalLM(RotaryDecoder):
    """`MiMoForCausalLM` checkpoints. Their layers for multi-token prediction have numbers of their own."""

    renames: Mapping[str, str] = {
        ".enorm.": ".token_layernorm.",
        ".hnorm.": ".hidden_layernorm.",
        ".eh_proj.": ".input_proj.",
        ".shared_head.norm.": ".final_layernorm.",
    }

    def __init__(self, config: Mapping[str, Any], build: BuildContext) -> None:
        super().__init__(read_mimo(config), build)

    def draft_layer_name(self, index: int) -> str:
        """Return the name of a layer for multi-token prediction in the checkpoint."""
        return f"model.mtp_layers.{index}"


class MiMoMTP(MultiTokenPredictor):
    """The first layer for multi-token prediction of a checkpoint."""

    def __init__(
        self, config: Mapping[str, Any], build: BuildContext, target: MiMoForCausalLM
    ) -> None:
        c = read_mimo(config)
        name = target.draft_layer_name(0)
        cos_sin = rotary_table(c.rope, build.device, build.max_model_len)
        (layer,) = [
            rotary_layer(draft_layer(c), build, index, name, cos_sin, target.renames)
            for index in build.each_layer(1)
        ]
        super().__init__(
            build,
            target,
            layer,
            name=name,
            hidden_size=c.hidden_size,
            norm_eps=c.norm_eps,
            is_hidden_first=True,
        )
