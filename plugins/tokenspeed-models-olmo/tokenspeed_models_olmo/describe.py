"""Reads and describes the `config.json` of OLMo 2 and 3. Imports no tensor library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from tokenspeed_core.api import ModelInfo
from tokenspeed_models.config import (
    ConfigReader,
    DecoderConfig,
    read_alternating_windows,
    read_decoder,
)
from tokenspeed_models.describe import model_info
from tokenspeed_models.rope_config import RopeConfig, read_layer_rope

Json = Mapping[str, Any]

_DEFAULTS: Json = {"rms_norm_eps": 1e-5}  # of transformers, for a missing key
_OLMO3_THETA = 500_000.0


@dataclass(frozen=True, slots=True)
class OlmoConfig:
    """An OLMo model. `decoder.rope` rotates in layers with full attention, `local_rope` in those with a window."""

    decoder: DecoderConfig
    local_rope: RopeConfig


def read_olmo2(config: Json) -> OlmoConfig:
    """Read an OLMo 2 configuration: full attention in all layers."""
    bias = ConfigReader(config).boolean("attention_bias", False)
    decoder = read_decoder(
        {**_DEFAULTS, **config}, "Olmo2ForCausalLM", qkv_bias=bias, out_bias=bias
    )
    return OlmoConfig(decoder, decoder.rope)


def read_olmo3(config: Json) -> OlmoConfig:
    """Read an OLMo 3 configuration: a window in three of four layers, to which the rotary scaling does not apply."""
    bias = ConfigReader(config).boolean("attention_bias", False)
    decoder = read_decoder(
        {**_DEFAULTS, **config},
        "Olmo3ForCausalLM",
        qkv_bias=bias,
        out_bias=bias,
        windows=read_alternating_windows(config, full_every=4),
        rope=partial(read_layer_rope, layer_type="full_attention", theta=_OLMO3_THETA),
    )
    local_rope = read_layer_rope(config, decoder.head_size, "sliding_attention", _OLMO3_THETA)
    return OlmoConfig(decoder, local_rope)


def describe_olmo2(config: Json) -> ModelInfo:
    """Describe an OLMo 2 checkpoint."""
    return _model_info(read_olmo2(config).decoder)


def describe_olmo3(config: Json) -> ModelInfo:
    """Describe an OLMo 3 checkpoint."""
    return _model_info(read_olmo3(config).decoder)


def _model_info(d: DecoderConfig) -> ModelInfo:
    """Count the norm weights of all query heads and of all key heads too."""
    return model_info(d, d.num_layers * (d.num_heads + d.num_kv_heads) * d.head_size)
