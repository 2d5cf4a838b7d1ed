"""Mistral: like Llama, with a sliding window in all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers import RotaryDecoder
from tokenspeed_models_mistral.describe import read_mistral


class MistralForCausalLM(RotaryDecoder):
    """`MistralForCausalLM` checkpoints."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext) -> None:
        super().__init__(read_mistral(config), build)
