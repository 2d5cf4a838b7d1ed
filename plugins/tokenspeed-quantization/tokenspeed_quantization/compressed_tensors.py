"""Reads `quant_method` "compressed-tensors", as llm-compressor writes it: a scheme for each group of layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenspeed_core.api import Axis, LayerSchemes, QuantizationScheme, StoredTensor
from tokenspeed_quantization.modules import matcher
from tokenspeed_quantization.schemes import (
    FP8,
    FP8_BLOCK,
    IN,
    OUT,
    fp8_stored,
    int4,
    int8_stored,
    mxfp4_stored,
)

_ORDERED = ("group", "dynamic")  # values of `actorder` with a tensor of groups


def read(settings: Mapping[str, Any]) -> LayerSchemes | None:
    """Return the schemes of a checkpoint in the format of compressed-tensors."""
    if settings.get("quant_method") != "compressed-tensors":
        return None
    transforms = settings.get("transform_config") or {}
    if transforms.get("config_groups"):
        raise ValueError("transform_config is not supported")
    sparsity = (settings.get("sparsity_config") or {}).get("format") or "dense"
    if sparsity != "dense":
        raise ValueError(f"sparsity_config has the format {sparsity}. Supported: dense.")
    groups = [
        (group["targets"], _read_group(name, group, settings.get("format")))
        for name, group in settings["config_groups"].items()
    ]
    # Groups that name their layers take precedence over one for all linear layers.
    groups.sort(key=lambda group: "Linear" in group[0])
    found = [
        (matcher("*" if each == "Linear" else each for each in targets), scheme)
        for targets, scheme in groups
    ]
    is_ignored = matcher(settings.get("ignore"))

    def scheme_of(layer: str) -> QuantizationScheme | None:
        if is_ignored(layer):
            return None
        return next((scheme for is_target, scheme in found if is_target(layer)), None)

    # In multimodal models of older transformers, the head is part of the language model.
    if all(scheme_of(name) is not None for name in ("lm_head", "language_model.lm_head")):
        raise ValueError("lm_head is quantized. Supported: lm_head in `ignore`.")
    return scheme_of


def read_only(settings: Mapping[str, Any], name: str) -> LayerSchemes | None:
    """Return the schemes if all groups have the scheme of that name."""
    schemes = read(settings)
    if schemes is None:
        return None
    groups = settings["config_groups"].items()
    is_only = all(
        _read_group(key, group, settings.get("format")).name == name for key, group in groups
    )
    return schemes if is_only else None


def _read_group(name: str, group: Mapping[str, Any], form: str | None) -> QuantizationScheme:
    """Return the scheme of a group. Raises ValueError, with the group's values, if it is not supported."""
    weights, inputs = group["weights"], group.get("input_activations")
    kind = (weights["num_bits"], weights["type"])
    is_stored = not weights.get("dynamic") and not group.get("output_activations")
    scheme = None
    if is_stored and inputs is None and kind == (4, "int"):
        scheme = _read_int4(weights, group.get("format") or form)
    elif is_stored and inputs is None and kind == (4, "float"):
        is_mx = (weights["strategy"], weights.get("group_size")) == ("group", 32)
        scheme = mxfp4_stored() if is_mx else None
    elif is_stored and inputs is not None and kind == (inputs["num_bits"], inputs["type"]):
        is_symmetric = weights.get("symmetric", True) and inputs.get("symmetric", True)
        if is_symmetric and kind == (8, "float"):
            scheme = _read_fp8(weights, inputs)
        elif is_symmetric and kind == (8, "int"):
            scheme = _read_int8(weights, inputs)
    if scheme is None:
        raise ValueError(
            f"{name} has {_describe(weights)} weights and {_describe(inputs)} activations. Supported: 8-bit float and "
            "8-bit int for both (symmetric; weights per-tensor or per-channel, float also per-block of 128 x 128; "
            "activations per-token dynamic or per-tensor), and 4-bit int (per-channel or in groups) and 4-bit float weights (groups "
            "of 32) with unquantized activations"
        )
    return scheme


def _read_fp8(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> QuantizationScheme | None:
    if weights["strategy"] == "block":
        is_grouped = inputs["strategy"] == "group" and inputs.get("group_size") == 128
        is_square = list(weights.get("block_structure") or ()) == [128, 128]
        is_block = is_square and is_grouped and inputs.get("dynamic") is True
        return replace(FP8_BLOCK, scale_name="weight_scale") if is_block else None
    static = _is_static(inputs)
    if static is None or weights["strategy"] not in ("tensor", "channel"):
        return None
    if weights["strategy"] == "channel" and not static:
        return FP8
    return fp8_stored(per_channel=weights["strategy"] == "channel", static=static)


def _read_int8(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> QuantizationScheme | None:
    static = _is_static(inputs)
    if static is None or weights["strategy"] not in ("tensor", "channel"):
        return None
    return int8_stored(per_channel=weights["strategy"] == "channel", static=static)


def _read_int4(weights: Mapping[str, Any], form: str | None) -> QuantizationScheme | None:
    if weights["strategy"] not in ("group", "channel") or form not in ("pack-quantized", None):
        return None
    group_size = weights.get("group_size") or 0 if weights["strategy"] == "group" else 0
    group_size = max(group_size, 0)
    has_order = group_size > 0 and weights.get("actorder") in _ORDERED
    has_zeros = not weights.get("symmetric", True)
    groups = Axis("in", group_size)
    stored = [
        StoredTensor("weight_packed", "int32", (OUT, Axis("in", 8))),
        StoredTensor("weight_scale", "float", (OUT, groups), "scale", typical=4e-3),
        StoredTensor("weight_shape", "int64", (Axis("out", 0),), is_needed=False),
    ]
    if has_zeros:
        stored.append(StoredTensor("weight_zero_point", "int32", (Axis("out", 8), groups)))
    stored.append(StoredTensor("weight_g_idx", "int32", (IN,), "index", is_needed=has_order))
    return int4("compressed_tensors", stored, group_size, has_zeros=has_zeros, has_order=has_order)


def _is_static(inputs: Mapping[str, Any]) -> bool | None:
    """Return whether activations have a static per-tensor scale, or None if they are not supported.

    Dynamic per-tensor scales are replaced by dynamic per-token ones, which are more precise.
    """
    if inputs["strategy"] == "tensor":
        return not inputs.get("dynamic")
    return False if inputs["strategy"] == "token" and inputs.get("dynamic") is True else None


def _describe(scheme: Mapping[str, Any] | None) -> str:
    """Return the bits, type and granularity of weights or activations."""
    if scheme is None:
        return "unquantized"
    words = [f"{scheme.get('num_bits')}-bit {scheme.get('type')}", f"per-{scheme.get('strategy')}"]
    if scheme.get("group_size"):
        words.append(f"group_size {scheme['group_size']}")
    words.append("dynamic" if scheme.get("dynamic") else "static")
    words.append("symmetric" if scheme.get("symmetric", True) else "asymmetric")
    return " ".join(words)
