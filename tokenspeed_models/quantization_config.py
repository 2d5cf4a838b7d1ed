"""Reads `quantization_config` of `config.json`: the quantization method, and the modules it ignores."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import cache
from typing import Any


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """A format of quantized checkpoints and the quantization method that computes with it.

    `matches` takes a `quantization_config`. It may raise a KeyError, TypeError, ValueError or AttributeError for one
    of another format.
    """

    method: str
    description: str
    matches: Callable[[Mapping[str, Any]], bool]


def read_quantization(config: Mapping[str, Any]) -> str | None:
    """Return the quantization method of a checkpoint, or None for an unquantized one.

    Raises ValueError for a format that is not supported.
    """
    found = config.get("quantization_config")
    if found is None:
        return None
    for form in FORMATS:
        try:
            if form.matches(found):
                return form.method
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
    raise ValueError(
        f"config.json: quantization_config is not supported: {found!r:.300}. Supported: "
        f"{'; '.join(form.description for form in FORMATS)}. Use a checkpoint in one of these formats, or an "
        "unquantized one with --quantization fp8."
    )


def ignored_modules(config: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return those of the linear layers `names` that a quantized checkpoint leaves unquantized.

    Raises ValueError for an invalid regular expression.
    """
    found = config.get("quantization_config") or {}
    settings = found.get("quantization", found)
    ignored = settings.get("exclude_modules", settings.get("ignore")) or ()
    ignored_patterns = [_pattern(name) for name in ignored]
    groups = found.get("config_groups", {}).values()
    targets = [target for group in groups for target in group["targets"]] or ["Linear"]
    target_patterns = [_pattern("*" if target == "Linear" else target) for target in targets]

    def is_ignored(name: str) -> bool:
        if not any(pattern.match(name) for pattern in target_patterns):
            return True
        return any(pattern.match(name) for pattern in ignored_patterns)

    return [name for name in names if is_ignored(name)]


# Checkpoints may list hundreds of patterns, and each module of each layer is matched against all of them.
@cache
def _pattern(name: str) -> re.Pattern[str]:
    """Compile a module name (matches all modules below it too), wildcards, or a regular expression after "re:"."""
    if not name.startswith("re:"):
        return re.compile(rf"{translate(name)}|{re.escape(name)}\.")
    try:
        return re.compile(name.removeprefix("re:"))
    except re.error as error:
        raise ValueError(
            f"config.json: quantization_config has an invalid regular expression, {name!r}: {error}"
        ) from error


def _is_fp8(found: Mapping[str, Any]) -> bool:
    """Return whether compressed-tensors stores FP8 with per-channel weight scales and per-token input scales."""
    (group,) = found["config_groups"].values()
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**common, "strategy": "channel", "dynamic": False}
    inputs = {**common, "strategy": "token", "dynamic": True}
    return (
        found["quant_method"] == "compressed-tensors"
        and group["targets"] == ["Linear"]
        and "lm_head" in found["ignore"]
        and found.get("kv_cache_scheme") is None
        and weights.items() <= group["weights"].items()
        and inputs.items() <= group["input_activations"].items()
    )


def _is_fp8_block(found: Mapping[str, Any]) -> bool:
    """Return whether this is fine-grained FP8, as transformers and DeepSeek write it."""
    ignored = found.get("modules_to_not_convert", found.get("ignored_layers"))
    # These are never quantized, so that it makes no difference whether they are listed.
    never_quantized = ("lm_head", "embed_tokens", "norm")
    return (
        found["quant_method"] == "fp8"
        and list(found["weight_block_size"]) == [128, 128]
        and found.get("activation_scheme", "dynamic") == "dynamic"
        and found.get("fmt", "e4m3") == "e4m3"
        and found.get("scale_fmt") in (None, "float")
        and not found.get("modules_to_convert")
        and all(name.endswith(never_quantized) for name in ignored or ())
    )


def _is_mxfp8(found: Mapping[str, Any]) -> bool:
    if found.get("quant_method") == "compressed-tensors":
        return _is_compressed_tensors(found, "mxfp8-quantized", 8, 32, dynamic=True)
    return _is_modelopt(found, "MXFP8", 32)


def _is_nvfp4(found: Mapping[str, Any]) -> bool:
    if found.get("quant_method") == "compressed-tensors":
        return _is_compressed_tensors(found, "nvfp4-pack-quantized", 4, 16, dynamic="local")
    return _is_modelopt(found, "NVFP4", 16)


def _is_compressed_tensors(
    found: Mapping[str, Any], name: str, bits: int, group_size: int, *, dynamic: bool | str
) -> bool:
    """Return whether compressed-tensors stores weights and inputs in groups of `group_size`."""
    (group,) = found["config_groups"].values()
    common = {"num_bits": bits, "type": "float", "group_size": group_size, "symmetric": True}
    return (
        found["format"] == name
        and all(target == "Linear" or "." in target for target in group["targets"])
        and {**common, "dynamic": False}.items() <= group["weights"].items()
        and {**common, "dynamic": dynamic}.items() <= group["input_activations"].items()
        and not group.get("output_activations")
        and not found.get("transform_config")
        and not found.get("sparsity_config")
        and _is_optional_fp8_cache(found.get("kv_cache_scheme"))
    )


def _is_modelopt(found: Mapping[str, Any], algorithm: str, group_size: int) -> bool:
    """Return whether NVIDIA ModelOpt stores all linear layers by an algorithm.

    In `hf_quant_config.json` the settings are one level deeper than in `config.json`.
    """
    writer = found.get("quant_method") or found["producer"]["name"]
    settings = found.get("quantization", found)
    groups = [*found.get("config_groups", {}).values()] or [{"targets": ["Linear"]}]
    group_sizes = {settings.get("group_size") or group_size}
    for group in groups:
        for operand in ("weights", "input_activations"):
            if operand in group:
                group_sizes.add(group[operand].get("group_size") or group_size)
    return (
        writer in ("modelopt", "modelopt_fp4")
        and settings["quant_algo"] == algorithm
        and group_sizes == {group_size}
        and [group["targets"] for group in groups] == [["Linear"]]
        and settings.get("kv_cache_quant_algo") in (None, "FP8")
        and _is_optional_fp8_cache(settings.get("kv_cache_scheme"))
    )


def _is_optional_fp8_cache(scheme: Mapping[str, Any] | None) -> bool:
    """Return whether a KV cache scheme only adds scales, so that the cache may also be in the model's dtype."""
    if scheme is None:
        return True
    return (scheme["num_bits"], scheme["type"], scheme["dynamic"]) == (8, "float", False)


FORMATS = (
    CheckpointFormat(
        "fp8",
        "FP8 of compressed-tensors with per-channel weight scales (strategy channel), dynamic per-token input scales "
        "(strategy token), and all linear layers but lm_head quantized",
        _is_fp8,
    ),
    CheckpointFormat(
        "fp8-block",
        "fine-grained FP8 (quant_method fp8) with weight_block_size [128, 128], activation_scheme dynamic, float scales, "
        "and all linear layers but lm_head quantized",
        _is_fp8_block,
    ),
    CheckpointFormat(
        "mxfp8",
        "MXFP8 for weights and activations (quant_algo MXFP8 of NVIDIA ModelOpt, format mxfp8-quantized of "
        "compressed-tensors)",
        _is_mxfp8,
    ),
    CheckpointFormat(
        "nvfp4",
        "NVFP4 for weights and activations (quant_algo NVFP4, format nvfp4-pack-quantized)",
        _is_nvfp4,
    ),
)
