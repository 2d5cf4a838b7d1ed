"""Reads `quant_method` "auto-round": 4-bit weights of Intel AutoRound in the layout of GPTQ or AWQ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenspeed_core.api import LayerSchemes, QuantizationScheme
from tokenspeed_quantization import awq, gptq
from tokenspeed_quantization.modules import compiled

_LAYOUTS: Mapping[str, Callable[[Mapping[str, Any]], QuantizationScheme]] = {
    "auto_round:auto_gptq": gptq.scheme,
    "auto_round:auto_awq": awq.scheme,
}
_UNQUANTIZED_BITS = 16


def read(settings: Mapping[str, Any]) -> LayerSchemes | None:
    """Return the schemes of an AutoRound checkpoint.

    `extra_config` maps names of layers, or regular expressions, to other settings; 16 bits are unquantized.
    """
    if settings.get("quant_method") not in ("auto-round", "intel/auto-round"):
        return None
    layout, kind = str(settings.get("packing_format")), settings.get("data_type", "int")
    if layout not in _LAYOUTS or kind != "int":
        raise ValueError(
            f"packing_format is {layout!r} and data_type is {kind!r}. Supported: {' and '.join(_LAYOUTS)} with int."
        )
    make, common = _LAYOUTS[layout], {**settings, "desc_act": False}
    default = make(common)
    rules = [
        (compiled(name), None if _is_unquantized(changes) else make({**common, **changes}))
        for name, changes in (settings.get("extra_config") or {}).items()
    ]
    blocks = settings.get("block_name_to_quantize") or ""
    names = blocks.split(",") if isinstance(blocks, str) else blocks
    starts = tuple(f"{name.strip()}." for name in names if name)

    def scheme_of(layer: str) -> QuantizationScheme | None:
        if layer == "lm_head" or (starts and not layer.startswith(starts)):
            return None
        return next((each for pattern, each in rules if pattern.fullmatch(layer)), default)

    return scheme_of


def _is_unquantized(changes: Mapping[str, Any]) -> bool:
    return int(changes.get("bits", 0)) >= _UNQUANTIZED_BITS
