"""Which method of quantization a checkpoint is stored by, as `quantization_config` in its `config.json` says."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import cache
from typing import Any


@dataclass(frozen=True, slots=True)
class StoredForm:
    """A form of checkpoint, the method that computes with it, and how it is recognised.

    `holds` takes a `quantization_config`, and may fail with what indexing anything but such a thing fails with.
    """

    method: str
    description: str
    holds: Callable[[Mapping[str, Any]], bool]


def read_quantization(config: Mapping[str, Any]) -> str | None:
    """Return the method of a checkpoint whose linear maps, all but the head, are stored quantised, or None.

    Raises ValueError, saying what was found, on a form that cannot be served.
    """
    found = config.get("quantization_config")
    if found is None:
        return None
    for form in FORMS:
        try:
            if form.holds(found):
                return form.method
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
    raise ValueError(
        f"config.json: quantization_config is {found!r:.300}: served are checkpoints "
        f"{', and '.join(form.description for form in FORMS)}; use one of these, or an unquantised one with "
        "--quantization fp8"
    )


def ignored_modules(config: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return which linear maps, by their names there, a checkpoint that is stored quantised keeps whole.

    Raises ValueError on a regular expression that is none.
    """
    found = config.get("quantization_config") or {}
    told = found.get("quantization", found)
    kept = [_expression(name) for name in told.get("exclude_modules", told.get("ignore")) or ()]
    targets = [
        target for group in found.get("config_groups", {}).values() for target in group["targets"]
    ]
    asked = [
        _expression("*" if target == "Linear" else target) for target in targets or ("Linear",)
    ]
    return [
        name
        for name in names
        if not any(each.match(name) for each in asked) or any(each.match(name) for each in kept)
    ]


@cache  # of hundreds of patterns, which each part of each layer is compared with
def _expression(pattern: str) -> re.Pattern[str]:
    """Return what a writer matches names with: a name and all below it, wildcards, or behind "re:" an expression."""
    if not pattern.startswith("re:"):
        return re.compile(rf"{translate(pattern)}|{re.escape(pattern)}\.")
    try:
        return re.compile(pattern.removeprefix("re:"))
    except re.error as error:
        raise ValueError(
            f"config.json: quantization_config has {pattern!r}, no regular expression: {error}"
        ) from error


def _is_rowwise(found: Mapping[str, Any]) -> bool:
    (group,) = found["config_groups"].values()
    return (
        found["quant_method"] == "compressed-tensors"
        and group["targets"] == ["Linear"]
        and "lm_head" in found["ignore"]
        and found.get("kv_cache_scheme") is None
        and _WEIGHTS.items() <= group["weights"].items()
        and _ACTIVATIONS.items() <= group["input_activations"].items()
    )


def _is_blockwise(found: Mapping[str, Any]) -> bool:
    kept = found.get("modules_to_not_convert", found.get("ignored_layers"))
    return (
        found["quant_method"] == "fp8"
        and list(found["weight_block_size"]) == [128, 128]
        and found.get("activation_scheme", "dynamic") == "dynamic"
        and found.get("fmt", "e4m3") == "e4m3"
        and found.get("scale_fmt") in (None, "float")
        and not found.get("modules_to_convert")
        and all(name.endswith(_NO_LINEAR) for name in kept or ())
    )


def _is_mxfp8(found: Mapping[str, Any]) -> bool:
    if found.get("quant_method") == "compressed-tensors":
        return _is_grouped(found, "mxfp8-quantized", 8, 32, dynamic=True)
    return _is_modelopt(found, "MXFP8", 32)


def _is_nvfp4(found: Mapping[str, Any]) -> bool:
    if found.get("quant_method") == "compressed-tensors":
        return _is_grouped(found, "nvfp4-pack-quantized", 4, 16, dynamic="local")
    return _is_modelopt(found, "NVFP4", 16)


def _is_grouped(
    found: Mapping[str, Any], stored: str, bits: int, size: int, *, dynamic: bool | str
) -> bool:
    """Say whether compressed-tensors stores every Linear in groups of a size, activations in the same."""
    (group,) = found["config_groups"].values()
    common = {"num_bits": bits, "type": "float", "group_size": size, "symmetric": True}
    return (
        found["format"] == stored
        and all(name == "Linear" or "." in name for name in group["targets"])
        and {**common, "dynamic": False}.items() <= group["weights"].items()
        and {**common, "dynamic": dynamic}.items() <= group["input_activations"].items()
        and not group.get("output_activations")
        and not found.get("transform_config")
        and not found.get("sparsity_config")
        and _is_plain_cache(found.get("kv_cache_scheme"))
    )


def _is_modelopt(found: Mapping[str, Any], algorithm: str, size: int) -> bool:
    """Say whether NVIDIA ModelOpt stores all linear maps by an algorithm; its own file nests what config.json says."""
    writer, told = (
        found.get("quant_method") or found["producer"]["name"],
        found.get("quantization", found),
    )
    groups = [*found.get("config_groups", {}).values()] or [{"targets": ["Linear"]}]
    sizes = {told.get("group_size") or size} | {
        group[side].get("group_size") or size
        for group in groups
        for side in ("weights", "input_activations")
        if side in group
    }
    return (
        writer in ("modelopt", "modelopt_fp4")
        and told["quant_algo"] == algorithm
        and sizes == {size}
        and [group["targets"] for group in groups] == [["Linear"]]
        and told.get("kv_cache_quant_algo") in (None, "FP8")
        and _is_plain_cache(told.get("kv_cache_scheme"))
    )


def _is_plain_cache(scheme: Mapping[str, Any] | None) -> bool:
    """Say whether a scheme of the KV cache only adds scales to a checkpoint: the cache may be in the model's dtype."""
    return scheme is None or (scheme["num_bits"], scheme["type"], scheme["dynamic"]) == (
        8,
        "float",
        False,
    )


_WEIGHTS = {
    "num_bits": 8,
    "type": "float",
    "strategy": "channel",
    "symmetric": True,
    "dynamic": False,
}
_ACTIVATIONS = {
    "num_bits": 8,
    "type": "float",
    "strategy": "token",
    "symmetric": True,
    "dynamic": True,
}
_NO_LINEAR = (
    "lm_head",
    "embed_tokens",
    "norm",
)  # what may be listed as kept whole: it is, listed or not
FORMS = (
    StoredForm(
        "fp8",
        "of compressed-tensors that hold every Linear but lm_head as 8-bit float with strategy channel, and quantise "
        "activations as they come with strategy token",
        _is_rowwise,
    ),
    StoredForm(
        "fp8-block",
        "of fine-grained fp8 (quant_method fp8) with weight_block_size [128, 128], scales of any value, activations "
        "quantised as they come (activation_scheme dynamic), and every linear map but lm_head converted",
        _is_blockwise,
    ),
    StoredForm(
        "mxfp8",
        "of MXFP8 for weights and activations (NVIDIA ModelOpt's quant_algo MXFP8, compressed-tensors' format "
        "mxfp8-quantized)",
        _is_mxfp8,
    ),
    StoredForm(
        "nvfp4",
        "of NVFP4 for weights and activations (quant_algo NVFP4, format nvfp4-pack-quantized)",
        _is_nvfp4,
    ),
)
