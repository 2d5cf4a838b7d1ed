"""The scales of a quantized KV cache, from the file that --quantization-param-path names."""

from __future__ import annotations

import json
from pathlib import Path

from tokenspeed_core.errors import ConfigError


def read_kv_scales(path: str | None, num_layers: int) -> tuple[float, ...]:
    """Return the scale of each layer; empty without a path.

    The file holds `{"kv_cache": {"scaling_factor": {"0": {"0": 0.02, "1": ...}}}}`. The outer key is the
    tensor-parallel rank, the inner one the layer. Raises ConfigError naming the file.
    """
    if path is None:
        return ()
    try:
        factors = json.loads(Path(path).read_text())["kv_cache"]["scaling_factor"]["0"]
        scales = tuple(float(factors[str(layer)]) for layer in range(num_layers))
        if not all(0 < scale < float("inf") for scale in scales):
            raise ValueError("a scale is not positive and finite")
        return scales
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--quantization-param-path {path}: {type(error).__name__}: {error}. Expected "
            f'{{"kv_cache": {{"scaling_factor": {{"0": {{"0": NUMBER, ...}}}}}}}} '
            f"for layers 0 to {num_layers - 1}."
        ) from error
