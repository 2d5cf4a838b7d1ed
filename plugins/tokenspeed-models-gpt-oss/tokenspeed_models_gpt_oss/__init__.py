"""The descriptor of the gpt-oss family. Imports no tensor library."""

from __future__ import annotations

from tokenspeed_core.api import ModelSpec

__all__ = ["GPT_OSS"]

GPT_OSS = ModelSpec(
    architecture="GptOssForCausalLM",
    describe="tokenspeed_models_gpt_oss.describe:describe_gpt_oss",
    load="tokenspeed_models_gpt_oss.model:GptOssForCausalLM",
)
