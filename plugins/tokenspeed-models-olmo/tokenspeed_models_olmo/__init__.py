"""The descriptors of the OLMo families. Imports no tensor library."""

from __future__ import annotations

from tokenspeed_core.api import ModelSpec

__all__ = ["OLMO2", "OLMO3"]

OLMO2 = ModelSpec(
    architecture="Olmo2ForCausalLM",
    describe="tokenspeed_models_olmo.describe:describe_olmo2",
    load="tokenspeed_models_olmo.model:Olmo2ForCausalLM",
)
OLMO3 = ModelSpec(
    architecture="Olmo3ForCausalLM",
    describe="tokenspeed_models_olmo.describe:describe_olmo3",
    load="tokenspeed_models_olmo.model:Olmo3ForCausalLM",
)
