"""Reads MXFP8 and NVFP4 checkpoints of compressed-tensors and NVIDIA ModelOpt. Imports no tensor library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenspeed_quantization.modules import matcher

from tokenspeed_core.api import LayerSchemes, QuantizationScheme
from tokenspeed_kernels_blackwell.contracts import MXFP8, NVFP4


@dataclass(frozen=True, slots=True)
class _Form:
    """A scheme as the two writers name it."""

    scheme: QuantizationScheme
    algorithm: str  # of ModelOpt
    format: str  # of compressed-tensors
    num_bits: int
    group_size: int
    dynamic: bool | str  # of activations


_MXFP8 = _Form(MXFP8, "MXFP8", "mxfp8-quantized", 8, 32, dynamic=True)
_NVFP4 = _Form(NVFP4, "NVFP4", "nvfp4-pack-quantized", 4, 16, dynamic="local")


def read_mxfp8(settings: Mapping[str, Any]) -> LayerSchemes | None:
    """Return the schemes of an MXFP8 checkpoint."""
    return _read(settings, _MXFP8)


def read_nvfp4(settings: Mapping[str, Any]) -> LayerSchemes | None:
    """Return the schemes of an NVFP4 checkpoint."""
    return _read(settings, _NVFP4)


def _read(settings: Mapping[str, Any], form: _Form) -> LayerSchemes | None:
    """Return the schemes if all quantized layers have this form.

    In `hf_quant_config.json` the settings are one level deeper than in `config.json`.
    """
    if settings.get("quant_method") == "compressed-tensors":
        if settings.get("format") != form.format:
            return None
        _check_compressed_tensors(settings, form)
        inner = settings
    else:
        writer = settings.get("quant_method") or settings.get("producer", {}).get("name")
        inner = settings.get("quantization", settings)
        is_own = writer in ("modelopt", "modelopt_fp4")
        if not is_own or inner.get("quant_algo") != form.algorithm:
            return None
        _check_modelopt(inner, form)
    _check_kv_cache(inner.get("kv_cache_scheme"))
    groups = inner.get("config_groups", {}).values()
    targets = [target for group in groups for target in group["targets"]] or ["Linear"]
    is_target = matcher("*" if target == "Linear" else target for target in targets)
    is_ignored = matcher(inner.get("exclude_modules", inner.get("ignore")))

    def scheme_of(layer: str) -> QuantizationScheme | None:
        return form.scheme if is_target(layer) and not is_ignored(layer) else None

    return scheme_of


def _check_compressed_tensors(settings: Mapping[str, Any], form: _Form) -> None:
    """Raise ValueError unless weights and activations are stored in groups of the form's size."""
    common = {
        "num_bits": form.num_bits,
        "type": "float",
        "group_size": form.group_size,
        "symmetric": True,
    }
    groups = [*settings["config_groups"].values()]
    (group,) = groups
    is_layers = all(target == "Linear" or "." in target for target in group["targets"])
    is_weights = {**common, "dynamic": False}.items() <= group["weights"].items()
    is_inputs = {**common, "dynamic": form.dynamic}.items() <= group["input_activations"].items()
    extra = [key for key in ("transform_config", "sparsity_config") if settings.get(key)]
    if not (is_layers and is_weights and is_inputs) or group.get("output_activations") or extra:
        raise ValueError(
            f"format {form.format} is supported only for linear layers with symmetric {form.num_bits}-bit weights and "
            f"activations in groups of {form.group_size}, without transforms and sparsity"
        )


def _check_modelopt(settings: Mapping[str, Any], form: _Form) -> None:
    """Raise ValueError unless all linear layers have groups of the form's size."""
    groups = [*settings.get("config_groups", {}).values()]
    sizes = {settings.get("group_size") or form.group_size}
    for group in groups:
        for operand in ("weights", "input_activations"):
            if operand in group:
                sizes.add(group[operand].get("group_size") or form.group_size)
    if sizes != {form.group_size} or any(group["targets"] != ["Linear"] for group in groups):
        raise ValueError(
            f"quant_algo {form.algorithm} is supported only for linear layers with groups of {form.group_size}"
        )
    if len(groups) > 1:
        raise ValueError(f"{len(groups)} config_groups. Supported: one.")
    if settings.get("kv_cache_quant_algo") not in (None, "FP8"):
        raise ValueError(
            f"kv_cache_quant_algo is {settings['kv_cache_quant_algo']}. Supported: FP8."
        )


def _check_kv_cache(scheme: Mapping[str, Any] | None) -> None:
    """Raise ValueError unless a KV cache scheme only adds scales, so that the cache may be in the model's dtype."""
    if scheme is None:
        return
    if (scheme["num_bits"], scheme["type"], scheme["dynamic"]) != (8, "float", False):
        raise ValueError(f"kv_cache_scheme is {dict(scheme)}. Supported: static 8-bit float.")
