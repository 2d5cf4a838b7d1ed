"""Reads `quant_method` "awq": 4-bit weights in groups with zero points, as AutoAWQ writes them (version "gemm")."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenspeed_core.api import Axis, LayerSchemes, QuantizationScheme, StoredTensor
from tokenspeed_quantization.modules import part_matcher
from tokenspeed_quantization.schemes import IN, OUT, int4


def read(settings: Mapping[str, Any]) -> LayerSchemes | None:
    """Return the schemes of an AWQ checkpoint."""
    if settings.get("quant_method") != "awq":
        return None
    found = scheme(settings)
    is_skipped = part_matcher(["lm_head", *(settings.get("modules_to_not_convert") or ())])
    return lambda layer: None if is_skipped(layer) else found


def scheme(settings: Mapping[str, Any]) -> QuantizationScheme:
    """Return the scheme of layers with these settings. Raises ValueError if it is not supported."""
    # Older writers have other names for some settings.
    bits = settings.get("bits", settings.get("w_bit"))
    group_size = settings.get("group_size", settings.get("q_group_size", 128))
    version = str(settings.get("version", settings.get("format", "gemm"))).lower()
    has_zeros = settings.get("zero_point", True)
    if bits != 4 or version != "gemm" or not has_zeros:
        raise ValueError(
            f"bits is {bits}, version is {version!r}, zero_point is {has_zeros}. Supported: 4 bits, version 'gemm', with "
            "zero points."
        )
    group_size = 0 if group_size == -1 else group_size
    words, groups = Axis("out", 8), Axis("in", group_size)
    stored = (
        StoredTensor("qweight", "int32", (IN, words)),
        StoredTensor("qzeros", "int32", (groups, words)),
        StoredTensor("scales", "float", (groups, OUT), "scale", typical=3e-3),
    )
    return int4("awq", stored, group_size, has_zeros=True, has_order=False)
