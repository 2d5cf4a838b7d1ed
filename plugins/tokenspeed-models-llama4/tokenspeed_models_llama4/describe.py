"""Reads and describes the `config.json` of Llama 4. Imports no tensor library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tokenspeed_core.api import ModelInfo
from tokenspeed_models.config import ConfigReader, DecoderConfig, is_list_of, read_decoder
from tokenspeed_models.describe import model_info
from tokenspeed_models.moe_config import MoeConfig, RoutingConfig
from tokenspeed_models.rope_config import LongRopeScaling, RopeConfig, YarnScaling, read_rope

Json = Mapping[str, Any]
# Published configurations leave out keys that have the default of transformers.
_DEFAULTS: Json = {
    "vocab_size": 202_048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16_384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# The keys of a multimodal configuration that its language model has too.
_SHARED = ("torch_dtype", "dtype", "tie_word_embeddings")


@dataclass(frozen=True, slots=True)
class Llama4Config:
    """A Llama 4 model. The windows of `decoder` are chunks.

    `has_rope` says which layers rotate queries and keys. With `has_unit_norm` they also normalize them, without
    weights. The other layers multiply queries at position p by 1 + `attention_growth` * log(1 + floor((p + 1) /
    `floor_scale`)).
    """

    decoder: DecoderConfig
    has_rope: tuple[bool, ...]
    has_unit_norm: bool
    attention_growth: float
    floor_scale: int


def read_llama4(config: Json, architecture: str = "Llama4ForCausalLM") -> Llama4Config:
    """Read a configuration of the language model. Raises ValueError naming the key."""
    config = {**_DEFAULTS, **{key: each for key, each in config.items() if each is not None}}
    keys = ConfigReader(config)
    num_layers = keys.integer("num_hidden_layers")
    has_rope = _read_rope_layers(keys, num_layers)
    bias = keys.boolean("attention_bias", False)
    decoder = read_decoder(
        {**config, "intermediate_size": keys.integer("intermediate_size_mlp")},
        architecture,
        qkv_bias=bias,
        out_bias=bias,
        windows=_read_chunks(config, has_rope),
        moe=_read_moe(keys, num_layers),
        rope=partial(read_rope, theta=500_000.0),
    )
    has_unit_norm = keys.boolean("use_qk_norm", True)
    if has_unit_norm:
        decoder = replace(decoder, rope=_without_factor(decoder.rope))
    # A number in the first published configurations.
    is_tuned = bool(config.get("attn_temperature_tuning", True))
    return Llama4Config(
        decoder,
        has_rope,
        has_unit_norm,
        keys.number("attn_scale", 0.1) if is_tuned else 0.0,
        keys.integer("floor_scale", 8192),
    )


def _without_factor(rope: RopeConfig) -> RopeConfig:
    """Return the rotation with an attention factor of 1. The norms after the rotation cancel the factor."""
    if not isinstance(rope.scaling, YarnScaling | LongRopeScaling):
        return rope
    return replace(rope, scaling=replace(rope.scaling, attention_factor=1.0))


def _read_rope_layers(keys: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Return which layers rotate: 1 in `no_rope_layers`, by default all but each fourth."""
    found = keys.integers("no_rope_layers")
    if not found:
        interval = keys.integer("no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if len(found) < num_layers:
        raise ValueError(
            f"config.json: no_rope_layers has {len(found)} entries, expected one for each of the {num_layers} layers"
        )
    return tuple(map(bool, found[:num_layers]))


def _read_chunks(config: Json, has_rope: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Return the length of each layer's chunks, None for layers that attend to all positions."""
    known = {"chunked_attention": True, "full_attention": False}
    default = ["chunked_attention" if each else "full_attention" for each in has_rope]
    kinds = config.get("layer_types", default)
    if not is_list_of(kinds, known) or len(kinds) != len(has_rope):
        raise ValueError(
            f"config.json: layer_types is {kinds!r}, expected {' or '.join(known)} for each of the {len(has_rope)} "
            "layers"
        )
    size = ConfigReader(config).integer("attention_chunk_size", 8192)
    return tuple(size if known[kind] else None for kind in kinds)


def _read_moe(keys: ConfigReader, num_layers: int) -> MoeConfig:
    """Read the mixture of experts: sigmoid routing to one expert with a scaled input, and a shared expert."""
    num_experts, size = keys.integer("num_local_experts", 16), keys.integer("intermediate_size")
    top_k = keys.integer("num_experts_per_tok", 1)
    if top_k != 1:
        raise ValueError(
            f"config.json: num_experts_per_tok is {top_k}. Supported: 1, because a token's score scales the input of its "
            "expert."
        )
    step = keys.integer("interleave_moe_layer_step", 1)
    layers = keys.integers("moe_layers") or range(step - 1, num_layers, step)
    return MoeConfig(
        RoutingConfig(num_experts, top_k, score="sigmoid"),
        intermediate_size=size,
        layers=frozenset(layer for layer in layers if layer < num_layers),
        shared_size=size,
    )


def text_config(config: Json) -> Json:
    """Return the configuration of the language model in a configuration with vision."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"config.json: text_config is {text!r}, expected an object")
    return {**{key: config[key] for key in _SHARED if config.get(key) is not None}, **text}


def read_llama4_multimodal(config: Json) -> Llama4Config:
    """Read the language model of a configuration with vision."""
    return read_llama4(text_config(config), "Llama4ForConditionalGeneration")


def describe_llama4(config: Json) -> ModelInfo:
    """Describe a text checkpoint."""
    return model_info(read_llama4(config).decoder)


def describe_llama4_multimodal(config: Json) -> ModelInfo:
    """Describe the language model of a checkpoint with vision."""
    return model_info(read_llama4_multimodal(config).decoder)
