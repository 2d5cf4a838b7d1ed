"""Reads the rotary position settings of `config.json`, in old or new keys. Imports no tensor library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Keys that no supported family uses. They change the meaning of a scaling.
_UNSUPPORTED = ("partial_rotary_factor", "mrope_section", "short_factor", "long_factor")
_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions are divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies are divided by `factor`, high ones are kept, those between are interpolated (Llama 3.1)."""

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
class RopeConfig:
    """Rotary positions with base `theta` on the first `size` values of each head.

    `max_positions` is the longest sequence, in tokens, that the scaling supports.
    """

    theta: float
    size: int
    max_positions: int
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None


def read_rope(config: Mapping[str, Any], head_size: int) -> RopeConfig:
    """Read `rope_parameters`, or `rope_theta` with `rope_scaling`. Raises ValueError naming the key.

    Dynamic NTK changes nothing up to `max_position_embeddings`. Beyond that it would rotate keys anew that are in the
    cache, so models with it are limited to that length and computed without scaling.
    """
    # --hf-overrides may add rope_scaling to a config that has rope_parameters.
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    keys = config.get(name) or {}
    if not isinstance(keys, Mapping):
        raise ValueError(f"config.json: {name} is {keys!r}, expected an object")
    for key in _UNSUPPORTED:
        source = keys if keys.get(key) is not None else config
        if source.get(key) not in (None, 1.0):
            raise ValueError(f"config.json: {key} is not supported")
    maximum = _positive(config, "max_position_embeddings", "max_position_embeddings")
    thetas = (at.get("rope_theta") for at in (keys, config, config.get("rope_parameters") or {}))
    theta = _positive(
        {"rope_theta": next(filter(None, thetas), 10000.0)}, "rope_theta", "rope_theta"
    )
    kind = keys.get("rope_type") or keys.get("type") or "default"
    source = next(
        (at for at in (config, keys) if at.get(_ORIGINAL) is not None), {_ORIGINAL: maximum}
    )
    original = int(_positive(source, _ORIGINAL, _ORIGINAL))
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None
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
        case _:
            raise ValueError(
                f"config.json: {name}.rope_type is {kind!r}. Supported: default, linear, dynamic, "
                "llama3, yarn."
            )
    return RopeConfig(theta, head_size, int(maximum), scaling)


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


def _positive(keys: Mapping[str, Any], key: str, name: str) -> float:
    """Return a positive number. Raises ValueError with `name` for anything else."""
    value = keys.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ValueError(f"config.json: {name} is {value!r}, expected a positive number")
    return float(value)
