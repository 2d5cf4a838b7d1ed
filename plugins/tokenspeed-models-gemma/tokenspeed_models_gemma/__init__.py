"""The descriptors of the Gemma families. Imports no tensor library."""

from __future__ import annotations

from tokenspeed_core.api import ModelSpec

__all__ = ["GEMMA2", "GEMMA3", "GEMMA3_MULTIMODAL"]

GEMMA2 = ModelSpec(
    architecture="Gemma2ForCausalLM",
    describe="tokenspeed_models_gemma.describe:describe_gemma2",
    load="tokenspeed_models_gemma.model:Gemma2ForCausalLM",
)
GEMMA3 = ModelSpec(
    architecture="Gemma3ForCausalLM",
    describe="tokenspeed_models_gemma.describe:describe_gemma3",
    load="tokenspeed_models_gemma.model:Gemma3ForCausalLM",
)
GEMMA3_MULTIMODAL = ModelSpec(
    architecture="Gemma3ForConditionalGeneration",
    describe="tokenspeed_models_gemma.describe:describe_gemma3_multimodal",
    load="tokenspeed_models_gemma.model:Gemma3ForConditionalGeneration",
)
