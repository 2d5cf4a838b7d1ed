"""Reads INT8 checkpoints when the user names the method `w8a8_int8`; the same name quantizes on load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenspeed_core.api import LayerSchemes
from tokenspeed_quantization import compressed_tensors
from tokenspeed_quantization.modules import matcher
from tokenspeed_quantization.schemes import int8_stored


def read(settings: Mapping[str, Any]) -> LayerSchemes | None:
    """Return the schemes of a checkpoint with the `quant_method` "w8a8_int8" or "compressed-tensors"."""
    if settings.get("quant_method") == "w8a8_int8":
        scheme = int8_stored(per_channel=True, static=False)
        is_skipped = matcher(["lm_head", *(settings.get("ignore") or ())])
        return lambda layer: None if is_skipped(layer) else scheme
    return compressed_tensors.read_only(settings, "int8")
