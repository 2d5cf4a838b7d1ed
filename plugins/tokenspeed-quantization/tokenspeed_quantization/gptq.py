"""Reads `quant_method` "gptq": 4-bit weights in groups, as AutoGPTQ and GPTQModel write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tokenspeed_core.api import Axis, LayerSchemes, QuantizationScheme, StoredTensor
from tokenspeed_quantization.modules import compiled
from tokenspeed_quantization.schemes import IN, OUT, int4

_FORMATS = {"gptq": "gptq", "gptq_v2": "gptq_v2"}


def read(settings: Mapping[str, Any]) -> LayerSchemes | None:
    """Return the schemes of a GPTQ checkpoint.

    `dynamic` of GPTQModel maps regular expressions to settings of some layers; those after "-:" are unquantized.
    """
    if settings.get("quant_method") != "gptq":
        return None
    if settings.get("lm_head"):
        raise ValueError("lm_head is quantized. Supported: lm_head false.")
    default = scheme(settings)
    rules = [_rule(name, changes, settings) for name, changes in _dynamic(settings).items()]
    blocks = settings.get("modules_in_block_to_quantize") or ()
    inside = tuple(
        f".{name}" for names in blocks for name in ([names] if isinstance(names, str) else names)
    )

    def scheme_of(layer: str) -> QuantizationScheme | None:
        if layer == "lm_head" or (inside and not layer.endswith(inside)):
            return None
        return next((each for pattern, each in rules if pattern.match(layer)), default)

    return scheme_of


def _dynamic(settings: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    found: Mapping[str, Mapping[str, Any]] = settings.get("dynamic") or {}
    return found


def _rule(
    name: str, changes: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[re.Pattern[str], QuantizationScheme | None]:
    """Return a pattern of layers and their scheme. Raises ValueError for an invalid pattern."""
    found = None if name.startswith("-:") else scheme({**settings, **changes})
    return compiled(name.removeprefix("-:").removeprefix("+:")), found


def scheme(settings: Mapping[str, Any]) -> QuantizationScheme:
    """Return the scheme of layers with these settings. Raises ValueError if it is not supported."""
    bits, group_size = settings.get("bits"), settings.get("group_size", -1)
    form = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if bits != 4 or form not in _FORMATS:
        raise ValueError(
            f"bits is {bits} and checkpoint_format is {form!r}. Supported: 4 bits in the formats "
            f"{' and '.join(_FORMATS)}."
        )
    group_size = 0 if group_size == -1 else group_size
    is_symmetric = settings.get("sym", True)
    has_order = bool(settings.get("desc_act")) and group_size > 0
    words, groups = Axis("out", 8), Axis("in", group_size)
    stored = (
        StoredTensor("qweight", "int32", (Axis("in", 8), OUT)),
        StoredTensor("qzeros", "int32", (groups, words)),
        StoredTensor("scales", "float", (groups, OUT), "scale", typical=3e-3),
        StoredTensor("g_idx", "int32", (IN,), "index", is_needed=has_order),
    )
    writer = f"{_FORMATS[form]}_symmetric" if is_symmetric else _FORMATS[form]
    return int4(writer, stored, group_size, has_zeros=not is_symmetric, has_order=has_order)
