"""The descriptors of the Mistral and Mixtral families. Imports no tensor library."""

from __future__ import annotations

from tokenspeed_core.api import ModelSpec

__all__ = ["MISTRAL", "MIXTRAL"]

MISTRAL = ModelSpec(
    architecture="MistralForCausalLM",
    describe="tokenspeed_models_mistral.describe:describe_mistral",
    load="tokenspeed_models_mistral.model:MistralForCausalLM",
)
MIXTRAL = ModelSpec(
    architecture="MixtralForCausalLM",
    describe="tokenspeed_models_mistral.describe:describe_mixtral",
    load="tokenspeed_models_mistral.mixtral:MixtralForCausalLM",
)
