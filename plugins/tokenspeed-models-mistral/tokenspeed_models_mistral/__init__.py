"""The descriptor of the Mistral family. Imports no tensor library."""

from __future__ import annotations

from tokenspeed_core.api import ModelSpec

__all__ = ["MISTRAL"]

MISTRAL = ModelSpec(
    architecture="MistralForCausalLM",
    describe="tokenspeed_models_mistral.describe:describe_mistral",
    load="tokenspeed_models_mistral.model:MistralForCausalLM",
)
