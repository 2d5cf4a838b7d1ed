"""MiniMax-M2: partly rotated heads, a norm over all heads of queries and keys, experts with sigmoid routing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers import RotaryDecoder
from tokenspeed_models_minimax.describe import read_minimax_m2


class MiniMaxM2ForCausalLM(RotaryDecoder):
    """`MiniMaxM2ForCausalLM` checkpoints. Their layers for multi-token prediction are not read."""

    renames: Mapping[str, str] = {
        ".mlp.gate.e_score_correction_bias": ".block_sparse_moe.e_score_correction_bias",
        ".mlp.": ".block_sparse_moe.",
        ".gate_proj.": ".w1.",
        ".up_proj.": ".w3.",
        ".down_proj.": ".w2.",
    }

    def __init__(self, config: Mapping[str, Any], build: BuildContext) -> None:
        super().__init__(read_minimax_m2(config), build)
