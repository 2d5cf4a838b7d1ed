"""Reads the `config.json` of decoder families. Imports no tensor library.

Old and new keys are both accepted: `rope_theta` with `rope_scaling` or `rope_parameters`, `torch_dtype` or `dtype`.
Errors are ValueErrors that name the key, its value and the accepted values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from tokenspeed_models.moe_config import MoeConfig
from tokenspeed_models.rope_config import RopeConfig, read_rope

DTYPES = ("bfloat16", "float16", "float32")

MAX_INTEGER = 2**31 - 1
MAX_LAYERS = 16384  # each takes time and memory before any weight is read
MAX_NUMBER = 1e30


class ConfigReader:
    """Typed access to a checkpoint's configuration. Raises ValueError for a missing key or a wrong value."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def __contains__(self, key: str) -> bool:
        return self.config.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a positive integer. Without a default the key is required."""
        value = self._value(key, default, "a positive integer")
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ValueError(f"config.json: {key} is {value!r}, expected a positive integer")
        limit = MAX_LAYERS if key.endswith("_layers") else MAX_INTEGER
        if value > limit:
            raise ValueError(f"config.json: {key} is above {limit}, which is implausible")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number. Without a default the key is required."""
        value = self._value(key, default, "a positive number")
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ValueError(f"config.json: {key} is {value!r}, expected a positive number")
        if value > MAX_NUMBER:
            raise ValueError(f"config.json: {key} is above {MAX_NUMBER}, which is implausible")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        value = self._value(key, default, "true or false")
        if not isinstance(value, bool):
            raise ValueError(f"config.json: {key} is {value!r}, expected true or false")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """Return a list of integers: none if the key is missing, one if its value is an integer."""
        value = self.config.get(key)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in values):
            raise ValueError(
                f"config.json: {key} is {value!r}, expected an integer or a list of integers"
            )
        return tuple(values)

    def choice(self, key: str, accepted: tuple[str, ...], default: str) -> str:
        """Return one of the accepted strings."""
        value = self._value(key, default, f"one of {', '.join(accepted)}")
        if value not in accepted:
            raise ValueError(f"config.json: {key} is {value!r}. Supported: {', '.join(accepted)}.")
        return str(value)

    def refuse(self, key: str, reason: str) -> None:
        """Raise ValueError if the key is set."""
        if key in self:
            raise ValueError(f"config.json: {key} is not supported: {reason}")

    def _value(self, key: str, default: Any, kind: str) -> Any:
        value = self.config.get(key)
        if value is not None:
            return value
        if default is None:
            raise ValueError(f"config.json: {key} is missing, expected {kind}")
        return default


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder with rotary attention and gated MLPs or experts.

    `qk_norm` normalizes each head of queries and keys, or with `is_qk_norm_joint` all heads together. `windows` has
    the number of tokens that each layer's attention sees, the query's own included, or None for all. `max_model_len` is
    the longest sequence, in tokens, that the rotary scaling supports. `num_draft_layers` are the layers of multi-token
    prediction in the checkpoint.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_eps: float
    tie_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    is_qk_norm_joint: bool
    windows: tuple[int | None, ...]
    rope: RopeConfig
    moe: MoeConfig | None
    num_draft_layers: int
    dtype: str
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


def read_decoder(
    config: Mapping[str, Any],
    architecture: str,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    is_qk_norm_joint: bool = False,
    head_size: int | None = None,
    num_kv_heads: int | None = None,
    windows: tuple[int | None, ...] | None = None,
    moe: MoeConfig | None = None,
    num_draft_layers: int = 0,
    activation: str = "silu",
    rope: Callable[[Mapping[str, Any], int], RopeConfig] = read_rope,
) -> DecoderConfig:
    """Read the keys that all decoder families share. The arguments are the differences between families.

    `head_size` and `num_kv_heads` are defaults for a missing key; None means hidden size / heads, and one KV head per
    query head. `activation` is the family's only one, as config.json spells it. `rope` reads the rotation from the
    configuration and the head size. Raises ValueError naming the key if the configuration is not supported.
    """
    keys = ConfigReader(config)
    for key in ("hidden_act", "hidden_activation"):
        keys.choice(key, (activation,), activation)
    num_layers, num_heads = keys.integer("num_hidden_layers"), keys.integer("num_attention_heads")
    kv_heads = keys.integer("num_key_value_heads", num_kv_heads or num_heads)
    if num_heads % kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads ({num_heads}) is not a multiple of "
            f"num_key_value_heads ({kv_heads})"
        )
    size = keys.integer("head_dim", head_size or keys.integer("hidden_size") // num_heads)
    rotation = rope(config, size)
    bos = keys.integers("bos_token_id")
    return DecoderConfig(
        architecture=architecture,
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        intermediate_size=keys.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_size=size,
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        tie_embeddings=keys.boolean("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        is_qk_norm_joint=is_qk_norm_joint,
        windows=windows or (None,) * num_layers,
        rope=rotation,
        moe=moe,
        num_draft_layers=num_draft_layers,
        dtype=read_dtype(config),
        max_model_len=rotation.max_positions,
        eos_token_ids=keys.integers("eos_token_id"),
        bos_token_id=bos[0] if bos else None,
    )


def read_dtype(config: Mapping[str, Any]) -> str:
    """Return `dtype`, or the older `torch_dtype`, or float32; bfloat16 for a quantized checkpoint without both keys."""
    key = "dtype" if config.get("dtype") is not None else "torch_dtype"
    default = "bfloat16" if config.get("quantization_config") else "float32"
    return ConfigReader(config).choice(key, DTYPES, default)


def is_list_of(value: Any, known: Iterable[str]) -> TypeGuard[list[str]]:
    """Return whether a value of a configuration is a list of known texts. It may hold anything, such as lists."""
    return isinstance(value, list) and all(each in tuple(known) for each in value)


def read_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return each layer's window from `layer_types`, or `use_sliding_window` and `max_window_layers`."""
    keys = ConfigReader(config)
    num_layers = keys.integer("num_hidden_layers")
    if not keys.boolean("use_sliding_window", False):
        return (None,) * num_layers
    if config.get("layer_types") is None:
        window = keys.integer("sliding_window", 4096)
        first = 28 if config.get("max_window_layers") is None else config["max_window_layers"]
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return read_alternating_windows(config)


def read_alternating_windows(
    config: Mapping[str, Any], full_every: int | None = None
) -> tuple[int | None, ...]:
    """Return each layer's window from `layer_types`.

    Without that key, every layer has a window but the last of each `full_every`. None: the key is required.
    """
    keys = ConfigReader(config)
    num_layers, window = keys.integer("num_hidden_layers"), keys.integer("sliding_window", 4096)
    kinds = config.get("layer_types")
    if kinds is None and full_every is not None:
        return tuple(window if (layer + 1) % full_every else None for layer in range(num_layers))
    known = {"sliding_attention": window, "full_attention": None}
    if not is_list_of(kinds, known) or len(kinds) != num_layers:
        raise ValueError(
            f"config.json: layer_types is {kinds!r}, expected {' or '.join(known)} for each of the "
            f"{num_layers} layers"
        )
    return tuple(known[kind] for kind in kinds)
