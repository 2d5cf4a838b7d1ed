"""What a Mistral `config.json` says. Imports no tensor library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenspeed_core.api import ModelInfo
from tokenspeed_models.config import ConfigReader, DecoderConfig, read_decoder
from tokenspeed_models.describe import model_info


def read_mistral(config: Mapping[str, Any]) -> DecoderConfig:
    """Read a configuration. One window holds for all layers; a null one means none.

    Configurations of before the window was a key mean 4096 tokens, as transformers reads them. Raises
    ValueError naming the key.
    """
    keys = ConfigReader(config)
    keys.refuse(
        "layer_types", "windows by layer belong to Ministral, which this family does not serve"
    )
    is_open = "sliding_window" in config and config["sliding_window"] is None
    window = None if is_open else keys.integer("sliding_window", 4096)
    return read_decoder(
        config,
        "MistralForCausalLM",
        num_kv_heads=8,
        windows=(window,) * keys.integer("num_hidden_layers"),
    )


def describe_mistral(config: Mapping[str, Any]) -> ModelInfo:
    """Describe a Mistral checkpoint."""
    return model_info(read_mistral(config))
