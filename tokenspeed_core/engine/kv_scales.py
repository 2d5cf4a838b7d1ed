"""The scales of a KV cache of eight bits, from the file that calibration tools write."""

from __future__ import annotations

import json
from pathlib import Path

from tokenspeed_core.errors import ConfigError


def read_kv_scales(path: str | None, num_layers: int) -> tuple[float, ...]:
    """Return each layer's scale from `{"kv_cache": {"scaling_factor": {"0": {"0": 0.02, "1": ...}}}}`, none of no file.

    The outer key is the process, of which there is one. Raises ConfigError, naming the file and what it lacks.
    """
    if path is None:
        return ()
    try:
        factors = json.loads(Path(path).read_text())["kv_cache"]["scaling_factor"]["0"]
        scales = tuple(float(factors[str(layer)]) for layer in range(num_layers))
        if not all(0 < scale < float("inf") for scale in scales):
            raise ValueError("its scales are not all above 0 and finite")
        return scales
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--quantization-param-path {path}: {type(error).__name__} {error}; it must hold "
            f'{{"kv_cache": {{"scaling_factor": {{"0": {{"0": NUMBER, ...}}}}}}}} for layers 0 to {num_layers - 1}'
        ) from error
