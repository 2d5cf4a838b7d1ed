"""Reads and describes a gpt-oss `config.json`. Imports no tensor library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokenspeed_core.api import ModelInfo
from tokenspeed_models.config import (
    ConfigReader,
    DecoderConfig,
    read_alternating_windows,
    read_decoder,
)
from tokenspeed_models.describe import model_info
from tokenspeed_models.moe_config import MoeConfig, RoutingConfig

Json = Mapping[str, Any]

# Defaults for missing keys of config.json, as in transformers. Published checkpoints have no dtype; tensors that are not in MXFP4 are bfloat16.
_DEFAULTS = {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "sliding_window": 128,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True, slots=True)
class GptOssConfig:
    """A decoder with experts in every layer. Their SwiGLU has the factor `alpha` and the bound `limit`."""

    decoder: DecoderConfig
    moe: MoeConfig
    alpha: float
    limit: float


def read_gpt_oss(config: Json) -> GptOssConfig:
    """Read a configuration. Raises ValueError naming the key."""
    given = {**_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    if not {"dtype", "torch_dtype"} & given.keys():
        given["dtype"] = "bfloat16"
    if not {"rope_parameters", "rope_scaling"} & given.keys():
        given["rope_scaling"] = _YARN
    keys = ConfigReader(given)
    num_layers, bias = keys.integer("num_hidden_layers"), keys.boolean("attention_bias", True)
    moe = MoeConfig(
        RoutingConfig(
            keys.integer("num_local_experts", 128),
            keys.integer("num_experts_per_tok", 4),
            score="top_k_softmax",
        ),
        intermediate_size=keys.integer("intermediate_size"),
        layers=frozenset(range(num_layers)),
        has_router_bias=True,
    )
    decoder = read_decoder(
        given,
        "GptOssForCausalLM",
        qkv_bias=bias,
        out_bias=bias,
        windows=read_alternating_windows(_with_layer_types(given, num_layers)),
        moe=moe,
    )
    return GptOssConfig(
        decoder,
        moe,
        alpha=keys.number("swiglu_alpha", 1.702),
        limit=keys.number("swiglu_limit", 7.0),
    )


def _with_layer_types(config: Json, num_layers: int) -> Json:
    """Return a configuration with `layer_types`: by default, every second layer has full attention."""
    kinds = ("sliding_attention", "full_attention")
    return {"layer_types": [kinds[layer % 2] for layer in range(num_layers)], **config}


def describe_gpt_oss(config: Json) -> ModelInfo:
    """Describe a checkpoint. Sinks and the experts' biases are parameters that no other family has."""
    c = read_gpt_oss(config)
    info, decoder, moe = model_info(c.decoder), c.decoder, c.moe
    num_biases = moe.routing.num_experts * (2 * moe.intermediate_size + decoder.hidden_size)
    extra = decoder.num_layers * (decoder.num_heads + num_biases)
    return replace(info, num_parameters=info.num_parameters + extra)
