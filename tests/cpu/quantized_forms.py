"""Forms of quantized checkpoints: `quantization_config`, a function that quantizes a weight, and how inputs are rounded."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import preset_name_to_scheme
from integer_checkpoints import (
    GROUP,
    Quantizer,
    Stored,
    awq,
    compressed,
    compressed_ordered,
    compressed_scheme,
    fp8_per_tensor,
    gptq,
)
from quantized_build import TOKENS, read_schemes
from torch import Tensor, nn

from tokenspeed_core.api import LayerSchemes, ModelSpec, QuantizationScheme
from tokenspeed_core.kernels.installed import installed_ops
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.targets import load_target
from tokenspeed_models.descriptors import LLAMA
from tokenspeed_models.loading.safetensors import read_safetensors
from tokenspeed_models.testing import DenseBuild, sequence_logits

AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
AUTO_ROUND = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": GROUP,
    "sym": True,
    "data_type": "int",
    "packing_format": "auto_round:auto_awq",
    "block_name_to_quantize": "model.layers",
}
AUTO_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": "channel"}
FP8: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
PER_TOKEN = {"strategy": "token", "dynamic": True}


def by_compressed_tensors(
    form: str,
    weights: dict[str, Any],
    inputs: dict[str, Any] | None = None,
    *,
    input_scale: float | None = None,
) -> tuple[dict[str, Any], Quantizer]:
    """Return the settings that llm-compressor writes, and a function that quantizes a weight."""
    scheme = compressed_scheme(weights, inputs)
    settings = {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
    }

    def quantize(weight: Tensor) -> tuple[Stored, Tensor]:
        stored, meant = compressed(weight, scheme, form)
        if input_scale is not None:
            stored["input_scale"] = torch.tensor([input_scale])
        return stored, meant

    return settings, quantize


WEIGHT_ONLY: dict[str, tuple[dict[str, Any], Quantizer]] = {
    "awq": (AWQ, awq),
    "gptq": (GPTQ, gptq),
    "gptq asymmetric": ({**GPTQ, "sym": False}, partial(gptq, symmetric=False)),
    "gptq desc_act": (
        {**GPTQ, "sym": False, "desc_act": True},
        partial(gptq, symmetric=False, ordered=True),
    ),
    "AutoRound": ({**AUTO_ROUND, "packing_format": "auto_round:auto_gptq"}, gptq),
    "gptq_v2": (
        {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"},
        partial(gptq, symmetric=False, offset=0),
    ),
    "gptq per channel": (
        {**GPTQ, "group_size": -1, "desc_act": True},
        partial(gptq, group_size=96),
    ),
    "W4A16": by_compressed_tensors("pack-quantized", INT4),
    "W4A16 asymmetric": by_compressed_tensors("pack-quantized", {**INT4, "symmetric": False}),
    "W4A16 per channel": by_compressed_tensors(
        "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}
    ),
    "MXFP4A16": by_compressed_tensors(
        "mxfp4-pack-quantized",
        preset_name_to_scheme("MXFP4A16", ["Linear"]).weights.model_dump(),
    ),
    "W4A16 actorder": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "ignore": ["lm_head"],
            "config_groups": {
                "g": {"targets": ["Linear"], "weights": {**INT4, "actorder": "group"}}
            },
        },
        compressed_ordered,
    ),
}


def quantize_inputs(model: nn.Module, round_values: Callable[[Tensor], Tensor]) -> None:
    """Make a model quantize the inputs of all linear layers but the head."""
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(lambda module, inputs: round_values(inputs[0]))


def int8_rows(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def fp8_rows(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def fixed(scale: float, form: str) -> Callable[[Tensor], Tensor]:
    """Return a function that rounds to int8 or e4m3 values with one scale."""
    if form == "int8":
        return lambda x: (x / scale).round().clamp(-128, 127) * scale
    return lambda x: (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


STATIC = {"strategy": "tensor", "dynamic": False}
QUANTIZED_INPUTS = {
    "W8A8": (*by_compressed_tensors("int-quantized", INT8, {**INT8, **PER_TOKEN}), int8_rows),
    "W8A8 static": (
        *by_compressed_tensors("int-quantized", INT8, {**INT8, **STATIC}, input_scale=0.03),
        fixed(0.03, "int8"),
    ),
    "FP8 static": (
        *by_compressed_tensors("float-quantized", FP8, {**FP8, **STATIC}, input_scale=0.01),
        fixed(0.01, "fp8"),
    ),
    "FP8 dynamic": (
        *by_compressed_tensors("float-quantized", FP8, {**FP8, "dynamic": True}),
        fp8_rows,
    ),
    "w8a8_fp8": (
        {"quant_method": "w8a8_fp8"},
        by_compressed_tensors("float-quantized", {**FP8, "strategy": "channel"})[1],
        fp8_rows,
    ),
    "w8a8_int8": (
        {"quant_method": "w8a8_int8"},
        by_compressed_tensors("int-quantized", INT8)[1],
        int8_rows,
    ),
    "AutoFP8": (AUTO_FP8, partial(fp8_per_tensor, input_name="input_scale"), fixed(0.01, "fp8")),
    "transformers FP8": (
        {**AUTO_FP8, "weight_block_size": None},
        partial(fp8_per_tensor, scale_name="weight_scale_inv", input_name="activation_scale"),
        fixed(0.01, "fp8"),
    ),
    "ModelOpt FP8": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        partial(fp8_per_tensor, input_name="input_scale"),
        fixed(0.01, "fp8"),
    ),
}


class SchemeBuild(DenseBuild):
    """A build with a checkpoint's schemes, and the reference kernels of their ops."""

    def __init__(self, schemes: LayerSchemes) -> None:
        super().__init__()
        self._schemes, self._ops = schemes, installed_ops(Catalog.discover())

    def scheme(self, layer: str) -> QuantizationScheme | None:
        return self._schemes(layer)

    def op(self, op: str, **problem: Any) -> Callable[..., Any]:
        try:
            return super().op(op, **problem)
        except KeyError:
            kernel: Callable[..., Any] = load_target(self._ops[op].reference)(problem)
            return kernel


def logits(folder: Path, settings: dict[str, Any], spec: ModelSpec = LLAMA) -> Tensor:
    """Return the logits [T, vocab] of a checkpoint with the kernels that its schemes name."""
    build = SchemeBuild(read_schemes(settings)[1])
    config = json.loads((folder / "config.json").read_text())
    model = load_target(spec.load)(config, build)
    model.load_weights(read_safetensors(str(folder), model, lambda done, total: None))
    return sequence_logits(model, build, TOKENS)
