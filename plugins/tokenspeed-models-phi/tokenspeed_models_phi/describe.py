"""Reads and describes the `config.json` of Phi-3 and Phi-4. Imports no tensor library."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from tokenspeed_core.api import ModelInfo
from tokenspeed_models.config import ConfigReader, DecoderConfig, read_decoder
from tokenspeed_models.describe import model_info
from tokenspeed_models.rope_config import read_rope


def read_phi3(config: Mapping[str, Any]) -> DecoderConfig:
    """Read a configuration. All layers have the same window, or none; heads may be rotated in part.

    Raises ValueError naming the key.
    """
    keys = ConfigReader(config)
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        if keys.boolean(key, False):
            raise ValueError(f"config.json: {key} is True. Supported for this family: False.")
    window = keys.integer("sliding_window") if "sliding_window" in keys else None
    if window is not None and window >= keys.integer("max_position_embeddings"):
        window = None
    return read_decoder(
        {"rms_norm_eps": 1e-5, **config},
        "Phi3ForCausalLM",
        windows=(window,) * keys.integer("num_hidden_layers"),
        rope=partial(read_rope, is_partial=True),
    )


def describe_phi3(config: Mapping[str, Any]) -> ModelInfo:
    """Describe a Phi-3 or Phi-4 checkpoint."""
    return model_info(read_phi3(config))
