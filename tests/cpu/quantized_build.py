"""Helpers for quantization tests: a build that quantizes, and models loaded with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fine_grained import values
from tokenspeed_quantization.schemes import FP8_BLOCK
from torch import Tensor

from tokenspeed_core.api import LayerSchemes, ModelSpec, QuantizationScheme
from tokenspeed_core.checkpoint.quantization import find_quantization
from tokenspeed_core.kernels.installed import installed_ops
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.targets import load_target
from tokenspeed_models.descriptors import LLAMA, QWEN2, QWEN3, QWEN3_MOE
from tokenspeed_models.loading.safetensors import read_safetensors
from tokenspeed_models.testing import DenseBuild, sequence_logits

SPECS = {"Llama": LLAMA, "Qwen2": QWEN2, "Qwen3": QWEN3, "Qwen3Moe": QWEN3_MOE}
TOKENS: list[int] = torch.randint(
    3, 100, (40,), generator=torch.Generator().manual_seed(3)
).tolist()

# `quantization_config` of compressed-tensors for FP8 with per-channel scales
PER_CHANNEL: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head", "re:.*mlp.gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "float",
                "strategy": "channel",
                "symmetric": True,
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
}


class QuantizedBuild(DenseBuild):
    """A build with the reference kernels of a scheme's ops, and plain torch for all other ops.

    The scheme applies to the layers that `is_quantized` selects, to all by default.
    """

    def __init__(self, scheme: QuantizationScheme, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)
        self.own_scheme = scheme
        self.is_quantized: Callable[[str], Any] = lambda layer: True
        names = {scheme.quantize, scheme.quantize_weight, scheme.linear, *scheme.fused.values()}
        self._references = {
            name: contract.reference
            for name, contract in installed_ops(Catalog.discover()).items()
            if name in names
        }

    def scheme(self, layer: str) -> QuantizationScheme | None:
        return self.own_scheme if self.is_quantized(layer) else None

    def op(self, op: str, **problem: Any) -> Callable[..., Any]:
        if op not in self._references:
            return super().op(op, **problem)
        self.problems.append((op, problem))
        kernel: Callable[..., Any] = load_target(self._references[op])(problem)
        return kernel


class UnquantizedActivations(QuantizedBuild):
    """A build with quantized weights and unquantized activations."""

    def __init__(self) -> None:
        # the fused ops quantize activations too
        super().__init__(replace(FP8_BLOCK, fused={}))

    def op(self, op: str, **problem: Any) -> Callable[..., Any]:
        if op == "quantize_fp8_groups":
            return lambda x: (x, torch.ones(x.shape[0], -(-x.shape[1] // 128)))
        return super().op(op, **problem)


class UnquantizedExperts(UnquantizedActivations):
    """A build that multiplies the dequantized weights of experts."""

    def __init__(self) -> None:
        super().__init__()
        experts = {"moe_experts": "moe_experts_fp8_block"}
        self.own_scheme = replace(self.own_scheme, fused=experts)

    def op(self, op: str, **problem: Any) -> Callable[..., Any]:
        if op != "moe_experts_fp8_block":
            return super().op(op, **problem)
        plain = super().op("moe_experts", **problem)

        def wide(codes: Tensor, scales: Tensor) -> Tensor:
            pairs = zip(codes, scales, strict=True)
            return torch.stack([values(code, scale) for code, scale in pairs])

        return lambda x, gate_up, gate_up_scale, down, down_scale, *routing: plain(
            x, wide(gate_up, gate_up_scale), wide(down, down_scale), *routing
        )


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return random normal values, float32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the relative error of a tensor."""
    return float((found - expected).norm() / expected.norm())


def read_schemes(settings: Any) -> tuple[str, LayerSchemes]:
    """Return the installed method that reads a `quantization_config`, and its schemes."""
    checkpoint: Any = SimpleNamespace(
        name="tiny", path="tiny", config={"quantization_config": settings}
    )
    found = find_quantization(None, checkpoint, Catalog.discover())
    assert found is not None
    return found.name, found.scheme_of


def load(spec: ModelSpec, folder: Path, build: DenseBuild) -> Any:
    """Return a model with the weights of a checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    if isinstance(build, QuantizedBuild) and "quantization_config" in config:
        _, build.is_quantized = read_schemes(config["quantization_config"])
    model = load_target(spec.load)(config, build)
    model.load_weights(read_safetensors(str(folder), model, lambda done, total: None))
    return model


def checkpoint_logits(
    spec: ModelSpec, folder: Path, build: DenseBuild, token_ids: list[int] = TOKENS
) -> Tensor:
    """Return the logits [T, vocab] of a checkpoint."""
    return sequence_logits(load(spec, folder, build), build, token_ids)


def transformers_logits(model: Any, token_ids: list[int] = TOKENS) -> Tensor:
    """Return the logits [T, vocab] of a transformers model."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def logprob_errors(steps: Sequence[Any], logits: Tensor) -> Tensor:
    """Return the absolute errors of an answer's logprobs; logits are those of its steps [steps, vocab]."""
    errors = [
        abs(found.logprob - float(row[token]))
        for step, row in zip(steps, logits.log_softmax(dim=-1), strict=True)
        for token, found in step.items()
    ]
    return torch.tensor(errors)
