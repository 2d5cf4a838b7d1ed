"""GLM-4.5 (arXiv:2508.06471): partly rotated heads, and experts with sigmoid routing after dense first layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers import RotaryDecoder
from tokenspeed_models_glm.describe import read_glm4_moe


class Glm4MoeForCausalLM(RotaryDecoder):
    """`Glm4MoeForCausalLM` checkpoints. Their layers for multi-token prediction are not read."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext) -> None:
        super().__init__(read_glm4_moe(config), build)
