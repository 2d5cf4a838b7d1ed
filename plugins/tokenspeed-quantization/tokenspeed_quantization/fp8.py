"""Reads `quant_method` "fp8", as transformers, DeepSeek and many others write it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tokenspeed_core.api import LayerSchemes, QuantizationScheme
from tokenspeed_quantization.schemes import FP8_BLOCK


def read(settings: Mapping[str, Any]) -> LayerSchemes | None:
    """Return the schemes of a checkpoint whose `quant_method` is "fp8"."""
    if settings.get("quant_method") != "fp8":
        return None
    _require(settings, "fmt", ("e4m3", "float8_e4m3fn", None))
    _require(settings, "activation_scheme", ("dynamic", None))
    _require(settings, "scale_fmt", ("float", None))
    if list(settings.get("weight_block_size") or ()) != [128, 128]:
        found = settings.get("weight_block_size")
        raise ValueError(f"weight_block_size is {found}. Supported: [128, 128].")
    if settings.get("modules_to_convert"):
        raise ValueError("modules_to_convert is not supported")
    is_skipped = _skipped(settings)

    def scheme_of(layer: str) -> QuantizationScheme | None:
        return None if is_skipped(layer) else FP8_BLOCK

    return scheme_of


def read_block(settings: Mapping[str, Any]) -> LayerSchemes | None:
    """Return the schemes of a checkpoint with block-wise scales."""
    return read(settings) if settings.get("weight_block_size") else None


def _skipped(settings: Mapping[str, Any]) -> Any:
    """Return a function that says whether a layer is unquantized, by the rule of transformers.

    A name matches the module itself, all below it, and modules that end in it; it may be a regular expression.
    """
    names = settings.get("modules_to_not_convert") or settings.get("ignored_layers") or ()
    patterns = [re.compile(rf"(?:{name})(?:(?<=\.)|(?=\.|$))") for name in names]
    endings = tuple(names)
    return lambda layer: (
        layer.endswith(endings) or any(pattern.match(layer) for pattern in patterns)
    )


def _require(settings: Mapping[str, Any], key: str, accepted: tuple[str | None, ...]) -> None:
    """Raise ValueError unless a setting has an accepted value."""
    if settings.get(key) not in accepted:
        names = ", ".join(str(each) for each in accepted if each is not None)
        raise ValueError(f"{key} is {settings[key]!r}. Supported: {names}.")
