"""The descriptors of the Phi families. Imports no tensor library."""

from __future__ import annotations

from tokenspeed_core.api import ModelSpec

__all__ = ["PHI3"]

PHI3 = ModelSpec(
    architecture="Phi3ForCausalLM",
    describe="tokenspeed_models_phi.describe:describe_phi3",
    load="tokenspeed_models_phi.model:Phi3ForCausalLM",
)
