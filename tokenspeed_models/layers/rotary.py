"""Rotary position tables for every scaling in `RopeConfig`.

Frequencies are computed on the CPU in float32, so that all devices use the same values.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from tokenspeed_models.rope_config import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
    yarn_mscale,
)


def rotary_table(
    rope: RopeConfig, device: torch.device, max_model_len: int | None = None
) -> torch.Tensor:
    """Return the table, float32 [P, size]: size/2 cosines, then size/2 sines.

    It has as many positions P as the scaling supports, or as the engine's longest sequence `max_model_len` needs.
    """
    if max_model_len is not None:
        rope = replace(rope, max_positions=min(rope.max_positions, max_model_len))
    table = torch.empty(rope.max_positions, rope.size, dtype=torch.float32, device=device)
    # A plan needs no values, and torch would import its compiler to compute them on the meta device.
    if table.is_meta:
        return table
    frequencies, factor = inverse_frequencies(rope)
    positions = torch.arange(rope.max_positions, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies.to(device))
    cosines, sines = torch.split(table, rope.size // 2, dim=1)
    cosines.copy_(angles.cos())
    sines.copy_(angles.sin())
    return table.mul_(factor)


def inverse_frequencies(rope: RopeConfig) -> tuple[torch.Tensor, float]:
    """Return radians per position, float32 [size / 2], and the factor of cosines and sines."""
    exponents = torch.arange(0, rope.size, 2, dtype=torch.int64).float() / rope.size
    wavelengths = rope.theta**exponents  # over 2 pi, in positions
    match rope.scaling:
        case None:
            return 1.0 / wavelengths, 1.0
        case LinearScaling(factor):
            return 1.0 / wavelengths / factor, 1.0
        case Llama3Scaling():
            return _llama3(1.0 / wavelengths, rope.scaling), 1.0
        case YarnScaling():
            return _yarn(wavelengths, rope, rope.scaling), _yarn_attention_factor(rope.scaling)
        case LongRopeScaling(short_factors, long_factors, original_max_positions, factor):
            is_long = rope.max_positions > original_max_positions
            factors = torch.tensor(long_factors if is_long else short_factors)
            return 1.0 / (factors * wavelengths), factor


def _llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Divide low frequencies, keep high ones and interpolate between them, by rotations over the original context."""
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = blend.clamp(0.0, 1.0)
    return (1 - kept) * (frequencies / scaling.factor) + kept * frequencies


def _yarn(wavelengths: torch.Tensor, rope: RopeConfig, scaling: YarnScaling) -> torch.Tensor:
    """Interpolate between kept and divided frequencies along a ramp over the dimensions (arXiv:2309.00071, 3.2)."""

    def dimension(num_turns: float) -> float:
        # The dimension that makes `num_turns` rotations over the original context.
        length = scaling.original_max_positions / (num_turns * 2 * math.pi)
        return rope.size * math.log(length) / (2 * math.log(rope.theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.size - 1)
    width = high - low if high != low else 0.001  # avoids a division by zero
    ramp = ((torch.arange(rope.size // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return 1.0 / (scaling.factor * wavelengths) * ramp + 1.0 / wavelengths * (1 - ramp)


def _yarn_attention_factor(scaling: YarnScaling) -> float:
    """Return the configured factor, else the ratio of the two `mscale` forms, else the paper's default."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        whole = yarn_mscale(scaling.factor, scaling.mscale_all_dim)
        return yarn_mscale(scaling.factor, scaling.mscale) / whole
    return yarn_mscale(scaling.factor, 1.0)
