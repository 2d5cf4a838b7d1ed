"""Reads and describes a Mistral or Mixtral `config.json`. Imports no tensor library."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from tokenspeed_core.api import ModelInfo
from tokenspeed_models.config import ConfigReader, DecoderConfig, read_decoder
from tokenspeed_models.describe import model_info
from tokenspeed_models.moe_config import MoeConfig, RoutingConfig
from tokenspeed_models.rope_config import read_rope


def read_mistral(config: Mapping[str, Any]) -> DecoderConfig:
    """Read a configuration. All layers have the same window; null means none.

    If the key is missing the window is 4096 tokens, as in transformers. Raises ValueError naming the key.
    """
    keys = ConfigReader(config)
    keys.refuse("layer_types", "Ministral, with a window per layer, is another family")
    has_no_window = "sliding_window" in config and config["sliding_window"] is None
    window = None if has_no_window else keys.integer("sliding_window", 4096)
    return read_decoder(
        config,
        "MistralForCausalLM",
        num_kv_heads=8,
        windows=(window,) * keys.integer("num_hidden_layers"),
    )


def read_mixtral(config: Mapping[str, Any]) -> DecoderConfig:
    """Read a Mixtral configuration. All layers have experts, and the same window or none."""
    keys = ConfigReader(config)
    num_layers = keys.integer("num_hidden_layers")
    window = keys.integer("sliding_window") if "sliding_window" in keys else None
    return read_decoder(
        config,
        "MixtralForCausalLM",
        num_kv_heads=8,
        windows=(window,) * num_layers,
        rope=partial(read_rope, theta=1e6),
        moe=MoeConfig(
            RoutingConfig(
                keys.integer("num_local_experts", 8),
                keys.integer("num_experts_per_tok", 2),
                renormalize=True,
            ),
            intermediate_size=keys.integer("intermediate_size"),
            layers=frozenset(range(num_layers)),
        ),
    )


def describe_mixtral(config: Mapping[str, Any]) -> ModelInfo:
    """Describe a Mixtral checkpoint."""
    return model_info(read_mixtral(config))


def describe_mistral(config: Mapping[str, Any]) -> ModelInfo:
    """Describe a Mistral checkpoint."""
    return model_info(read_mistral(config))
