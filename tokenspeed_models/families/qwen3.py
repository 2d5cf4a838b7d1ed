"""Qwen3: normalized queries and keys, and sliding windows in upper layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenspeed_core.api import BuildContext
from tokenspeed_models.describe import read_qwen3
from tokenspeed_models.layers import RotaryDecoder


class Qwen3ForCausalLM(RotaryDecoder):
    """`Qwen3ForCausalLM` checkpoints."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext) -> None:
        super().__init__(read_qwen3(config), build)
