"""The descriptor of the models of Hugging Face transformers. Imports no tensor library."""

from __future__ import annotations

from tokenspeed_core.api import ANY_ARCHITECTURE, ModelSpec

__all__ = ["TRANSFORMERS"]

TRANSFORMERS = ModelSpec(
    architecture=ANY_ARCHITECTURE,
    describe="tokenspeed_models_transformers.describe:describe",
    load="tokenspeed_models_transformers.model:TransformersModel",
    runs_remote_code=True,
)
