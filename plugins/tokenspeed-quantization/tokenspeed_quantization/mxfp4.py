"""Reads `quant_method` "mxfp4", as gpt-oss has it: experts in MXFP4, everything else unquantized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenspeed_core.api import LayerSchemes, QuantizationScheme
from tokenspeed_quantization.modules import matcher
from tokenspeed_quantization.schemes import MXFP4


def read(settings: Mapping[str, Any]) -> LayerSchemes | None:
    """Return the schemes of a checkpoint with MXFP4 experts."""
    if settings.get("quant_method") != "mxfp4":
        return None
    is_ignored = matcher(settings.get("modules_to_not_convert"))

    def scheme_of(layer: str) -> QuantizationScheme | None:
        return MXFP4 if ".experts." in layer and not is_ignored(layer) else None

    return scheme_of
