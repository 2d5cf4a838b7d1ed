"""Reads `quant_method` "compressed-tensors", as llm-compressor writes it: a scheme for each group of layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenspeed_core.api import LayerSchemes, QuantizationScheme
from tokenspeed_quantization.modules import matcher
from tokenspeed_quantization.schemes import FP8


def read(settings: Mapping[str, Any]) -> LayerSchemes | None:
    """Return the schemes of a checkpoint in the format of compressed-tensors."""
    if settings.get("quant_method") != "compressed-tensors":
        return None
    for key in ("transform_config", "sparsity_config"):
        if settings.get(key):
            raise ValueError(f"{key} is not supported")
    is_ignored = matcher(settings.get("ignore"))
    groups = [
        (group["targets"], _read_group(name, group))
        for name, group in settings["config_groups"].items()
    ]
    # Groups that name their layers take precedence over one for all linear layers.
    groups.sort(key=lambda group: "Linear" in group[0])
    found = [
        (matcher("*" if each == "Linear" else each for each in targets), scheme)
        for targets, scheme in groups
    ]

    def scheme_of(layer: str) -> QuantizationScheme | None:
        if is_ignored(layer):
            return None
        return next((scheme for is_target, scheme in found if is_target(layer)), None)

    if scheme_of("lm_head") is not None:
        raise ValueError("lm_head is quantized. Supported: lm_head in `ignore`.")
    return scheme_of


def _read_group(name: str, group: Mapping[str, Any]) -> QuantizationScheme:
    """Return the scheme of a group. Raises ValueError, with what was found, if it is not supported."""
    weights, inputs = group["weights"], group.get("input_activations")
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    per_channel = {**common, "strategy": "channel", "dynamic": False}.items()
    per_token = {**common, "strategy": "token", "dynamic": True}.items()
    if per_channel <= weights.items() and inputs is not None and per_token <= inputs.items():
        return FP8
    raise ValueError(f"{name} has {_describe(weights)} weights and {_describe(inputs)} activations")


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
