"""Llama 2 and 3: grouped-query attention with rotary positions, a gated MLP, optional biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenspeed_core.api import BuildContext
from tokenspeed_models.describe import read_llama
from tokenspeed_models.layers import RotaryDecoder


class LlamaForCausalLM(RotaryDecoder):
    """`LlamaForCausalLM` checkpoints."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext) -> None:
        super().__init__(read_llama(config), build)
