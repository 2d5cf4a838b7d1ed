"""The descriptors of the DeepSeek and Kimi K2 families, and of GLM-4.7-Flash. Imports no tensor library."""

from __future__ import annotations

from tokenspeed_core.api import ModelSpec

__all__ = ["DEEPSEEK_V2", "DEEPSEEK_V3", "GLM4_MOE_LITE", "KIMI_K2", "KIMI_K25"]

_DESCRIBE, _MODEL = "tokenspeed_models_deepseek.describe", "tokenspeed_models_deepseek.model"

DEEPSEEK_V2 = ModelSpec(
    architecture="DeepseekV2ForCausalLM",
    describe=f"{_DESCRIBE}:describe_v2",
    load=f"{_MODEL}:DeepseekV2ForCausalLM",
)
DEEPSEEK_V3 = ModelSpec(
    architecture="DeepseekV3ForCausalLM",
    describe=f"{_DESCRIBE}:describe_v3",
    load=f"{_MODEL}:DeepseekV3ForCausalLM",
    mtp=f"{_DESCRIBE}:plan_mtp",
)
GLM4_MOE_LITE = ModelSpec(
    architecture="Glm4MoeLiteForCausalLM",
    describe=f"{_DESCRIBE}:describe_glm4_moe_lite",
    load=f"{_MODEL}:Glm4MoeLiteForCausalLM",
    mtp=f"{_DESCRIBE}:plan_glm4_moe_lite_mtp",
)
KIMI_K2 = ModelSpec(
    architecture="KimiK2ForCausalLM",
    describe=f"{_DESCRIBE}:describe_kimi_k2",
    load=f"{_MODEL}:DeepseekV3ForCausalLM",
)
KIMI_K25 = ModelSpec(
    architecture="KimiK25ForConditionalGeneration",
    describe=f"{_DESCRIBE}:describe_kimi_k25",
    load=f"{_MODEL}:KimiK25ForConditionalGeneration",
)
