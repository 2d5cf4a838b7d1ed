"""Reads and describes the `config.json` of Gemma 2 and 3. Imports no tensor library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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

_TIED = "tie_word_embeddings"
# Published configurations leave out keys that have the default of transformers.
_DEFAULTS: Json = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    _TIED: True,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_GEMMA2: Json = {
    **_DEFAULTS,
    "vocab_size": 256_000,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3: Json = {**_DEFAULTS, "vocab_size": 262_208, "max_position_embeddings": 131_072}
_BIDIRECTIONAL = "use_bidirectional_attention"
# The keys of a multimodal configuration that its language model has too.
_SHARED = ("eos_token_id", "bos_token_id", "torch_dtype", "dtype")


@dataclass(frozen=True, slots=True)
class GemmaConfig:
    """A Gemma model. `decoder.rope` rotates in layers with full attention, `local_rope` in those with a window.

    If it `is_bidirectional`, tokens of a prompt see later ones too.
    """

    decoder: DecoderConfig
    local_rope: RopeConfig
    attention_scale: float
    attention_soft_cap: float | None
    logit_soft_cap: float | None
    is_bidirectional: bool


def read_gemma2(config: Json) -> GemmaConfig:
    """Read a Gemma 2 configuration: a window in every second layer, one rotation, soft caps."""
    config = {**_GEMMA2, **config}
    _refuse_bidirectional(config)
    decoder = _read_decoder(config, "Gemma2ForCausalLM", full_every=2)
    return _read(config, decoder, decoder.rope)


def read_gemma3(config: Json, architecture: str = "Gemma3ForCausalLM") -> GemmaConfig:
    """Read a Gemma 3 configuration: a window in five of six layers, which have their own rotation, and QK norms.

    With `use_bidirectional_attention`, tokens of a prompt see later ones too.
    """
    config = {**_GEMMA3, **config}
    if ConfigReader(config).boolean(_BIDIRECTIONAL, False):
        # The configured window has both sides of a token; ours has one, and the token.
        window = ConfigReader(config).integer("sliding_window")
        config = {**config, "sliding_window": window // 2 + 1}
    pattern = "sliding_window_pattern"
    full_every = ConfigReader(config).integer(pattern if pattern in config else f"_{pattern}", 6)
    read_full_rope = partial(read_layer_rope, layer_type="full_attention", theta=1e6)
    decoder = _read_decoder(
        config, architecture, full_every=full_every, qk_norm=True, rope=read_full_rope
    )
    # The configured length includes the linear scaling.
    length = ConfigReader(config).integer("max_position_embeddings")
    rope = replace(decoder.rope, max_positions=length)
    decoder = replace(decoder, rope=rope, max_model_len=length)
    local_theta = ConfigReader(config).number("rope_local_base_freq", 10_000.0)
    local_rope = read_layer_rope(config, decoder.head_size, "sliding_attention", local_theta)
    return _read(config, decoder, local_rope)


def text_config(config: Json) -> Json:
    """Return the configuration of the language model in a Gemma 3 configuration with vision."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"config.json: text_config is {text!r}, expected an object")
    # Versions of transformers before 5 read the inner key, later ones the outer key.
    is_tied = all(ConfigReader(each).boolean(_TIED, True) for each in (config, text))
    shared = {key: config[key] for key in _SHARED if config.get(key) is not None}
    return {**text, **shared, _TIED: is_tied}


def read_gemma3_multimodal(config: Json) -> GemmaConfig:
    """Read the language model of a Gemma 3 configuration with vision."""
    text = text_config(config)
    _refuse_bidirectional(text)
    return read_gemma3(text, "Gemma3ForConditionalGeneration")


def _refuse_bidirectional(config: Json) -> None:
    """Raise ValueError for the key. The attention backends of transformers disagree about it in these models."""
    if ConfigReader(config).boolean(_BIDIRECTIONAL, False):
        raise ValueError(
            f"config.json: {_BIDIRECTIONAL} is true, which is supported in Gemma3ForCausalLM only"
        )


def _read_decoder(
    config: Json, architecture: str, *, full_every: int, **family: Any
) -> DecoderConfig:
    bias = ConfigReader(config).boolean("attention_bias", False)
    return read_decoder(
        config,
        architecture,
        qkv_bias=bias,
        out_bias=bias,
        windows=read_alternating_windows(config, full_every),
        activation="gelu_pytorch_tanh",
        **family,
    )


def _read(config: Json, decoder: DecoderConfig, local_rope: RopeConfig) -> GemmaConfig:
    keys = ConfigReader(config)
    caps = [
        keys.number(key) if key in keys else None
        for key in ("attn_logit_softcapping", "final_logit_softcapping")
    ]
    return GemmaConfig(
        decoder=decoder,
        local_rope=local_rope,
        attention_scale=keys.number("query_pre_attn_scalar") ** -0.5,
        attention_soft_cap=caps[0],
        logit_soft_cap=caps[1],
        is_bidirectional=keys.boolean(_BIDIRECTIONAL, False),
    )


def describe_gemma2(config: Json) -> ModelInfo:
    """Describe a Gemma 2 checkpoint."""
    return _model_info(read_gemma2(config))


def describe_gemma3(config: Json) -> ModelInfo:
    """Describe a Gemma 3 text checkpoint."""
    return _model_info(read_gemma3(config))


def describe_gemma3_multimodal(config: Json) -> ModelInfo:
    """Describe the language model of a Gemma 3 checkpoint with vision."""
    return _model_info(read_gemma3_multimodal(config))


def _model_info(c: GemmaConfig) -> ModelInfo:
    """Count the two norms after the blocks of each layer too."""
    info = model_info(c.decoder, 2 * c.decoder.num_layers * c.decoder.hidden_size)
    return replace(info, is_bidirectional=c.is_bidirectional)
