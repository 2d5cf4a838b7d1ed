"""The descriptors of Llama 4. Imports no tensor library."""

from __future__ import annotations

from tokenspeed_core.api import ModelSpec

__all__ = ["LLAMA4", "LLAMA4_MULTIMODAL"]

LLAMA4 = ModelSpec(
    architecture="Llama4ForCausalLM",
    describe="tokenspeed_models_llama4.describe:describe_llama4",
    load="tokenspeed_models_llama4.model:Llama4ForCausalLM",
)
LLAMA4_MULTIMODAL = ModelSpec(
    architecture="Llama4ForConditionalGeneration",
    describe="tokenspeed_models_llama4.describe:describe_llama4_multimodal",
    load="tokenspeed_models_llama4.model:Llama4ForConditionalGeneration",
)
