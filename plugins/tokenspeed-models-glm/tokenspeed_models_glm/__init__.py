"""The descriptor of the GLM-4.5 family. Imports no tensor library."""

from __future__ import annotations

from tokenspeed_core.api import ModelSpec

__all__ = ["GLM4_MOE"]

GLM4_MOE = ModelSpec(
    architecture="Glm4MoeForCausalLM",
    describe="tokenspeed_models_glm.describe:describe_glm4_moe",
    load="tokenspeed_models_glm.model:Glm4MoeForCausalLM",
    mtp="tokenspeed_models_glm.describe:plan_mtp",
)
