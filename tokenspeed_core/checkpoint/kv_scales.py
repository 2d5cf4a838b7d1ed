"""Finds the scales of an FP8 KV cache: those of --quantization-param-path, else those of the checkpoint, else 1."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from pathlib import Path

from tokenspeed_core.api.models import KVScale
from tokenspeed_core.checkpoint.resolve import ResolvedCheckpoint, choose_format
from tokenspeed_core.config import Config
from tokenspeed_core.errors import CheckpointError, ConfigError
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.targets import load_target


def find_kv_scales(
    config: Config, checkpoint: ResolvedCheckpoint, catalog: Catalog
) -> tuple[KVScale, ...]:
    """Return the scales of an FP8 KV cache for each layer; empty if all are 1.

    Raises ConfigError or CheckpointError for scales that are missing for some layers, or not positive and finite.
    """
    num_layers = checkpoint.info.num_layers
    if config.quantization_param_path is not None:
        return read_scale_file(config.quantization_param_path, num_layers)
    if config.kv_cache_dtype == "auto":
        return ()
    form = choose_format(checkpoint.files, config.load_format, catalog, checkpoint.path)
    # A dry run does not download weights.
    has_files = any(True for pattern in form.detect for _ in checkpoint.path.glob(pattern))
    if form.kv_scales is None or not has_files:
        return ()
    try:
        found: Mapping[int, KVScale] = load_target(form.kv_scales)(str(checkpoint.path))
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if not found:
        return ()
    for layer in range(num_layers):
        if layer not in found or not _is_valid(found[layer]):
            what = f"are {found[layer]}" if layer in found else "are missing"
            raise CheckpointError(
                f"{checkpoint.path}: the FP8 KV cache scales of layer {layer} {what}. They must be positive and "
                "finite for all layers. Give --quantization-param-path, or --kv-cache-dtype auto."
            )
    return tuple(found[layer] for layer in range(num_layers))


def read_scale_file(path: str, num_layers: int) -> tuple[KVScale, ...]:
    """Return the scale of each layer, one for keys and values.

    The file holds `{"kv_cache": {"scaling_factor": {"0": {"0": 0.02, "1": ...}}}}`. The outer key is the
    tensor-parallel rank, the inner one the layer. Raises ConfigError naming the file.
    """
    try:
        factors = json.loads(Path(path).read_text())["kv_cache"]["scaling_factor"]["0"]
        numbers = [float(factors[str(layer)]) for layer in range(num_layers)]
        scales = tuple(KVScale(number, number) for number in numbers)
        if not all(map(_is_valid, scales)):
            raise ValueError("a scale is not positive and finite")
        return scales
    except OSError as error:
        raise ConfigError(f"--quantization-param-path {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--quantization-param-path {path}: {type(error).__name__}: {error}. Expected "
            f'{{"kv_cache": {{"scaling_factor": {{"0": {{"0": NUMBER, ...}}}}}}}} '
            f"for layers 0 to {num_layers - 1}."
        ) from error


def _is_valid(scale: KVScale) -> bool:
    return all(each > 0 and isfinite(each) for each in (scale.key, scale.value))
