"""The descriptor of the MiniMax-M2 family. Imports no tensor library."""

from __future__ import annotations

from tokenspeed_core.api import ModelSpec

__all__ = ["MINIMAX_M2"]

MINIMAX_M2 = ModelSpec(
    architecture="MiniMaxM2ForCausalLM",
    describe="tokenspeed_models_minimax.describe:describe_minimax_m2",
    load="tokenspeed_models_minimax.model:MiniMaxM2ForCausalLM",
)
