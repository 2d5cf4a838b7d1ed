"""Qwen2 and 2.5: like Llama, with biases on queries, keys and values, and sliding windows in upper layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenspeed_core.api import BuildContext
from tokenspeed_models.describe import read_qwen2
from tokenspeed_models.layers import RotaryDecoder


class Qwen2ForCausalLM(RotaryDecoder):
    """`Qwen2ForCausalLM` checkpoints."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext) -> None:
        super().__init__(read_qwen2(config), build)
