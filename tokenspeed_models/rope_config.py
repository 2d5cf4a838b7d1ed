"""Reads the rotary position settings of `config.json`, in old or new keys. Imports no tensor library."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "su")  # "su" is LongRoPE
_LONGROPE = ("short_factor", "long_factor")
_PARTIAL = "partial_rotary_factor"
_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions are divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies are divided by `factor`, high frequencies are unchanged, frequencies between are interpolated (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071): a ramp between kept and divided frequencies, and scaled attention logits.

    `attention_factor` multiplies cosines and sines, and therefore both queries and keys.
    """

    factor: float
    original_max_positions: int
    attention_factor: float | None
    mscale: float | None
    mscale_all_dim: float | None
    beta_fast: float
    beta_slow: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE (arXiv:2402.13753): each frequency is divided by its own factor.

    Engines for up to `original_max_positions` tokens use the short factors, and others the long ones, for all
    sequences: keys in the cache cannot be rotated again when a sequence grows beyond that length. `attention_factor`
    multiplies cosines and sines.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_positions: int
    attention_factor: float


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions with base `theta` on the first `size` values of each head.

    `max_positions` is the longest sequence, in tokens, that the scaling supports.
    """

    theta: float
    size: int
    max_positions: int
    scaling: LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | None


def read_layer_rope(
    config: Mapping[str, Any], head_size: int, layer_type: str, theta: float
) -> RopeConfig:
    """Read the rotation of layers of a type, such as "sliding_attention", in a family with one per type.

    Newer configurations have an object per type in `rope_parameters`. In older ones `rope_theta` and `rope_scaling`
    belong to layers with full attention, and the others have no scaling. `theta` is the default.
    """
    nested = config.get("rope_parameters") or {}
    if isinstance(nested, Mapping) and isinstance(nested.get(layer_type), Mapping):
        scaling = config.get("rope_scaling") if layer_type == "full_attention" else None
        keys = {**nested[layer_type], **(scaling or {})}
    elif layer_type == "full_attention":
        keys = {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})}
    else:
        keys = {}
    keys = {**keys, "rope_theta": keys.get("rope_theta") or theta}
    return read_rope({**config, "rope_scaling": None, "rope_parameters": keys}, head_size)


def read_rope(
    config: Mapping[str, Any],
    head_size: int,
    *,
    is_partial: bool = False,
    theta: float = 10000.0,
) -> RopeConfig:
    """Read `rope_parameters`, or `rope_theta` with `rope_scaling`. Raises ValueError naming the key.

    With `is_partial`, `partial_rotary_factor` is the part of each head that is rotated; otherwise it must be 1.
    `theta` is the family's default for a missing `rope_theta`.

    Dynamic NTK changes nothing up to `max_position_embeddings`. Beyond that, it would change the rotation of keys that
    are already in the cache, so models with it are limited to that length and computed without scaling.
    """
    # --hf-overrides may add rope_scaling to a config that has rope_parameters.
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    keys = config.get(name) or {}
    if not isinstance(keys, Mapping):
        raise ValueError(f"config.json: {name} is {keys!r}, expected an object")
    kind = keys.get("rope_type") or keys.get("type") or "default"
    if kind not in _KINDS:
        raise ValueError(
            f"config.json: {name}.rope_type is {kind!r}. Supported: {', '.join(_KINDS[:-1])}."
        )
    # These keys change the rotation.
    refused = ["mrope_section"]
    refused += [] if is_partial else [_PARTIAL]
    refused += [] if kind in ("longrope", "su") else _LONGROPE
    for key in refused:
        source = keys if keys.get(key) is not None else config
        if source.get(key) not in (None, 1.0):
            raise ValueError(f"config.json: {key} is not supported")
    size = head_size
    if is_partial:
        source = next(
            (at for at in (keys, config) if at.get(_PARTIAL) is not None), {_PARTIAL: 1.0}
        )
        size = int(head_size * _positive(source, _PARTIAL, _PARTIAL))
    maximum = _positive(config, "max_position_embeddings", "max_position_embeddings")
    thetas = (at.get("rope_theta") for at in (keys, config, config.get("rope_parameters") or {}))
    theta = _positive({"rope_theta": next(filter(None, thetas), theta)}, "rope_theta", "rope_theta")
    source = next(
        (at for at in (config, keys) if at.get(_ORIGINAL) is not None), {_ORIGINAL: maximum}
    )
    original = int(_positive(source, _ORIGINAL, _ORIGINAL))
    scaling: LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | None = None
    match kind:
        case "default":
            pass
        case "dynamic":
            _positive(keys, "factor", f"{name}.factor")
        case "linear":
            scaling = LinearScaling(_positive(keys, "factor", f"{name}.factor"))
            maximum = maximum * scaling.factor
        case "llama3":
            scaling = Llama3Scaling(
                factor=_positive(keys, "factor", f"{name}.factor"),
                low_freq_factor=_positive(keys, "low_freq_factor", f"{name}.low_freq_factor"),
                high_freq_factor=_positive(keys, "high_freq_factor", f"{name}.high_freq_factor"),
                original_max_positions=original,
            )
        case "yarn":
            scaling = _read_yarn(keys, name, original, maximum)
            maximum = max(maximum, original * scaling.factor)
        case "longrope" | "su":
            scaling = _read_longrope(keys, name, size, original, maximum)
    return RopeConfig(theta, size, int(maximum), scaling)


def _read_longrope(
    keys: Mapping[str, Any], name: str, size: int, original: int, maximum: float
) -> LongRopeScaling:
    """Read a LongRoPE scaling. A missing factor is the ratio of the two lengths."""
    factor = (
        _positive(keys, "factor", f"{name}.factor") if keys.get("factor") else maximum / original
    )
    attention_factor = keys.get("attention_factor")
    if attention_factor is None:
        attention_factor = (
            math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
        )
    return LongRopeScaling(
        short_factors=_factors(keys, "short_factor", name, size),
        long_factors=_factors(keys, "long_factor", name, size),
        original_max_positions=original,
        attention_factor=attention_factor,
    )


def _factors(keys: Mapping[str, Any], key: str, name: str, size: int) -> tuple[float, ...]:
    """Return one factor per pair of rotated values."""
    values = keys.get(key)
    if not isinstance(values, list) or len(values) != size // 2:
        raise ValueError(
            f"config.json: {name}.{key} is {values!r:.100}, expected a list of {size // 2} numbers, half the rotated "
            "values of a head (see partial_rotary_factor)"
        )
    return tuple(
        _positive({key: value}, key, f"{name}.{key}[{index}]") for index, value in enumerate(values)
    )


def _read_yarn(keys: Mapping[str, Any], name: str, original: int, maximum: float) -> YarnScaling:
    """Read a YaRN scaling. A missing factor is the ratio of the two lengths."""
    factor = (
        _positive(keys, "factor", f"{name}.factor") if keys.get("factor") else maximum / original
    )
    return YarnScaling(
        factor=factor,
        original_max_positions=original,
        attention_factor=keys.get("attention_factor"),
        mscale=keys.get("mscale"),
        mscale_all_dim=keys.get("mscale_all_dim"),
        beta_fast=keys.get("beta_fast") or 32.0,
        beta_slow=keys.get("beta_slow") or 1.0,
        truncate=keys.get("truncate") is not False,
    )


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's factor of attention logits for a context that is `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _positive(keys: Mapping[str, Any], key: str, name: str) -> float:
    """Return a positive number. Raises ValueError with `name` for anything else."""
    value = keys.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ValueError(f"config.json: {name} is {value!r}, expected a positive number")
    return float(value)
