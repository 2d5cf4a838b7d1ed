"""The descriptor of MiMo-7B. Imports no tensor library."""

from __future__ import annotations

from tokenspeed_core.api import ModelSpec

__all__ = ["MIMO"]

MIMO = ModelSpec(
    architecture="MiMoForCausalLM",
    describe="tokenspeed_models_mimo.describe:describe_mimo",
    load="tokenspeed_models_mimo.model:MiMoForCausalLM",
    mtp="tokenspeed_models_mimo.describe:plan_mtp",
)
