"""GLM-4.5 (arXiv:2508.06471): partly rotated heads, and experts with sigmoid routing after dense first layers."""

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
from tokenspeed_models_glm.describe import draft_layer, read_glm4_moe


class Glm4MoeForCausalLM(RotaryDecoder):
    """`Glm4MoeForCausalLM` checkpoints."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext) -> None:
        super().__init__(read_glm4_moe(config), build)


class Glm4MoeMTP(MultiTokenPredictor):
    """The first layer for multi-token prediction of a checkpoint."""

    def __init__(
        self, config: Mapping[str, Any], build: BuildContext, target: Glm4MoeForCausalLM
    ) -> None:
        c = read_glm4_moe(config)
        name = f"model.layers.{c.num_layers}"
        cos_sin = rotary_table(c.rope, build.device, build.max_model_len)
        (layer,) = [
            rotary_layer(draft_layer(c), build, index, name, cos_sin, target.renames)
            for index in build.each_layer(1)
        ]
        super().__init__(
            build, target, layer, name=name, hidden_size=c.hidden_size, norm_eps=c.norm_eps
        )
