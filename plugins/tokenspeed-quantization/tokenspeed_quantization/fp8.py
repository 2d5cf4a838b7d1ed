"""Reads FP8 checkpoints: `quant_method` "fp8" (transformers, DeepSeek, AutoFP8), "w8a8_fp8", and FP8 of ModelOpt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenspeed_core.api import LayerSchemes, QuantizationScheme
from tokenspeed_quantization import compressed_tensors
from tokenspeed_quantization.modules import matcher, part_matcher
from tokenspeed_quantization.schemes import FP8_BLOCK, fp8_stored


def read(settings: Mapping[str, Any]) -> LayerSchemes | None:
    """Return the schemes of a checkpoint with the `quant_method` "fp8" or the ModelOpt algorithm FP8."""
    if settings.get("quant_method") == "fp8":
        return _read_fp8(settings)
    return _read_modelopt(settings)


def read_block(settings: Mapping[str, Any]) -> LayerSchemes | None:
    """Return the schemes of a checkpoint with block-wise scales."""
    return read(settings) if settings.get("weight_block_size") else None


def read_w8a8(settings: Mapping[str, Any]) -> LayerSchemes | None:
    """Return the schemes of a checkpoint with per-channel weight scales.

    Its `quant_method` is "w8a8_fp8", or "compressed-tensors" if the user names this method.
    """
    if settings.get("quant_method") == "w8a8_fp8":
        scheme = fp8_stored(per_channel=True, static=False)
        return _except(matcher(["lm_head", *(settings.get("ignore") or ())]), scheme)
    return compressed_tensors.read_only(settings, "fp8")


def _read_fp8(settings: Mapping[str, Any]) -> LayerSchemes:
    """Read block-wise, per-tensor dynamic and per-tensor static scales."""
    _require(settings, "fmt", ("e4m3", "float8_e4m3fn", None))
    _require(settings, "activation_scheme", ("dynamic", "static", None))
    # Powers of two are floats. Activations keep float scales, which are more precise.
    _require(settings, "scale_fmt", ("float", "ue8m0", None))
    if settings.get("modules_to_convert"):
        raise ValueError("modules_to_convert is not supported")
    block = settings.get("weight_block_size")
    is_static = settings.get("activation_scheme") == "static"
    if block is None:
        # transformers always writes weight_block_size; AutoFP8 never does.
        is_transformers = "weight_block_size" in settings
        scheme = fp8_stored(
            per_channel=False,
            static=is_static,
            weight_scale="weight_scale_inv" if is_transformers else "weight_scale",
            input_scale="activation_scale" if is_transformers else "input_scale",
        )
    elif list(block) != [128, 128] or is_static:
        raise ValueError(
            f"weight_block_size is {block} with {'static' if is_static else 'dynamic'} activations. Supported: "
            "[128, 128] with dynamic activations, and null."
        )
    else:
        scheme = FP8_BLOCK
    skipped = settings.get("modules_to_not_convert") or settings.get("ignored_layers")
    return _except(part_matcher(["lm_head", *(skipped or ())]), scheme)


def _read_modelopt(settings: Mapping[str, Any]) -> LayerSchemes | None:
    """Read NVIDIA ModelOpt. In `hf_quant_config.json`, the settings are one level deeper."""
    writer = settings.get("quant_method") or settings.get("producer", {}).get("name")
    inner = settings.get("quantization", settings)
    if writer != "modelopt" or inner.get("quant_algo") != "FP8":
        return None
    names = inner.get("exclude_modules", inner.get("ignore"))
    scheme = fp8_stored(per_channel=False, static=True)
    return _except(matcher(["lm_head", *(names or ())]), scheme)


def _except(is_skipped: Callable[[str], bool], scheme: QuantizationScheme) -> LayerSchemes:
    """Return a scheme for all layers but the skipped ones."""
    return lambda layer: None if is_skipped(layer) else scheme


def _require(settings: Mapping[str, Any], key: str, accepted: tuple[str | None, ...]) -> None:
    """Raise ValueError unless a setting has an accepted value."""
    if settings.get(key) not in accepted:
        names = ", ".join(str(each) for each in accepted if each is not None)
        raise ValueError(f"{key} is {settings[key]!r}. Supported: {names}.")
