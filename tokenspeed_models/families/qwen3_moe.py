"""Qwen3-MoE: like Qwen3, with a mixture of experts instead of the MLP in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenspeed_core.api import BuildContext
from tokenspeed_models.describe import read_qwen3_moe
from tokenspeed_models.layers import RotaryDecoder


class Qwen3MoeForCausalLM(RotaryDecoder):
    """`Qwen3MoeForCausalLM` checkpoints."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext) -> None:
        super().__init__(read_qwen3_moe(config), build)
