"""Quantized checkpoints in the layouts that AutoAWQ, AutoGPTQ, GPTQModel, AutoFP8 and llm-compressor publish.

Written word by word from the layouts' descriptions, and by compressed-tensors itself for its own format; shares no code
with the readers under test.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from block_scaled import load_stacked
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

Stored = dict[str, Tensor]
# Takes a weight [O, I] and returns the stored tensors and the weight that they mean, float32.
Quantizer = Callable[[Tensor], tuple[Stored, Tensor]]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "initializer_range": 0.1,
}
GROUP = 32
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)


def quantized_groups(
    weight: Tensor, groups: Tensor, *, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [O, I] from 0 to 15, float16 scales [O, G] and zero points [O, G]; column i is in groups[i]."""
    num_groups = int(groups.max()) + 1
    codes = torch.empty(weight.shape, dtype=torch.int64)
    scales = torch.empty(weight.shape[0], num_groups, dtype=torch.float16)
    zeros = torch.full(scales.shape, 8)
    for group in range(num_groups):
        columns = (groups == group).nonzero().flatten()
        part = weight[:, columns]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            scales[:, group] = (torch.maximum(-low, high) / 7.5).half()
        else:
            scales[:, group] = ((high - low) / 15).half()
            zeros[:, group] = (-low / scales[:, group].float()).round().clamp(0, 15)
        scale, zero = scales[:, group : group + 1].float(), zeros[:, group : group + 1]
        codes[:, columns] = ((part / scale).round() + zero).clamp(0, 15).long()
    return codes, scales, zeros


def values(codes: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor) -> Tensor:
    """Return the weight that codes, scales and zero points mean."""
    return (codes - zeros[:, groups]).float() * scales.float()[:, groups]


def words(codes: Tensor, axis: int, places: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack eight adjacent codes along an axis into an int32; bits 4 k to 4 k + 3 hold the code at places[k]."""
    moved = codes.movedim(axis, -1).unflatten(-1, (-1, 8))
    packed = sum((moved[..., place] << 4 * bits) for bits, place in enumerate(places))
    packed = torch.where(packed >= 2**31, packed - 2**32, packed)
    return packed.to(torch.int32).movedim(-1, axis).contiguous()


def awq(weight: Tensor, group_size: int = GROUP) -> tuple[Stored, Tensor]:
    """Quantize as AutoAWQ's version "gemm": packed along the outputs, in its order of columns."""
    groups = torch.arange(weight.shape[1]) // group_size
    codes, scales, zeros = quantized_groups(weight, groups, symmetric=False)
    stored = {
        "qweight": words(codes.t(), 1, AWQ_PLACES),
        "qzeros": words(zeros.t(), 1, AWQ_PLACES),
        "scales": scales.t().contiguous(),
    }
    return stored, values(codes, scales, zeros, groups)


def gptq(
    weight: Tensor,
    *,
    group_size: int = GROUP,
    symmetric: bool = True,
    ordered: bool = False,
    offset: int = 1,
) -> tuple[Stored, Tensor]:
    """Quantize as AutoGPTQ: weights packed along the inputs, zero points along the outputs and reduced by `offset`."""
    groups = torch.arange(weight.shape[1]) // group_size
    if ordered:
        shuffled = torch.randperm(len(groups), generator=torch.Generator().manual_seed(7))
        groups = groups[shuffled]
    codes, scales, zeros = quantized_groups(weight, groups, symmetric=symmetric)
    stored = {
        "qweight": words(codes.t(), 0),
        "qzeros": words((zeros.t() - offset) % 16, 1),
        "scales": scales.t().contiguous(),
        "g_idx": groups.to(torch.int32),
    }
    return stored, values(codes, scales, zeros, groups)


def compressed_scheme(weights: dict[str, Any], inputs: dict[str, Any] | None) -> QuantizationScheme:
    """Return a scheme of compressed-tensors for all linear layers."""
    made = None if inputs is None else QuantizationArgs(**inputs)
    return QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(**weights), input_activations=made
    )


def compressed_ordered(weight: Tensor) -> tuple[Stored, Tensor]:
    """Quantize as compressed-tensors before 0.13 with activation ordering: column i is in group weight_g_idx[i]."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(5))
    groups = order // GROUP
    codes, scales, zeros = quantized_groups(weight, groups, symmetric=True)
    stored = {
        "weight_packed": words(codes, 1),
        "weight_scale": scales,
        "weight_g_idx": groups.to(torch.int32),
        "weight_shape": torch.tensor(weight.shape),
    }
    return stored, values(codes, scales, zeros, groups)


def compressed(weight: Tensor, scheme: QuantizationScheme, form: str) -> tuple[Stored, Tensor]:
    """Quantize with compressed-tensors."""
    args = scheme.weights
    assert args is not None
    state: Stored = {"weight": weight}
    strategy = getattr(args.strategy, "value", args.strategy)
    if strategy == "group":
        parts = weight.unflatten(1, (-1, args.group_size))
        low, high = parts.amin(-1), parts.amax(-1)
    elif strategy == "block":
        rows, columns = args.block_structure
        parts = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        low, high = parts.amin((1, 3)), parts.amax((1, 3))
    elif strategy == "channel":
        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    else:
        low, high = weight.amin().reshape(1), weight.amax().reshape(1)
    state["weight_scale"], zero = calculate_qparams(low, high, args)
    if not args.symmetric:
        state["weight_zero_point"] = zero
    compressor: Any = BaseCompressor.get_value_from_registry(form)
    stored: Stored = compressor.compress(dict(state), scheme)
    meant = compressor.decompress(dict(stored), scheme)["weight"].float()
    return stored, meant


def fp8_per_tensor(
    weight: Tensor, scale_name: str = "weight_scale", input_name: str | None = None
) -> tuple[Stored, Tensor]:
    """Quantize as AutoFP8, or as transformers with its names: one scale for the weight, and one for its inputs."""
    scale = weight.abs().max() / 448
    codes = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    stored = {"weight": codes, scale_name: scale}
    if input_name is not None:
        stored[input_name] = torch.tensor(0.01)
    return stored, codes.float() * scale


def store(
    folder: Path,
    model: nn.Module,
    settings: dict[str, Any],
    quantize: Quantizer,
    names: str = r"_proj\.weight$",
) -> Stored:
    """Quantize a checkpoint on disk and load the weights that it means into its model; return the stored tensors.

    Weights are quantized if the regular expression `names` occurs in their name.
    """
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    tensors, meant = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not re.search(names, name):
            tensors[name] = tensor
            continue
        stored, meant[name] = quantize(tensor)
        layer = name.removesuffix(".weight")
        tensors |= {f"{layer}.{part}": each.contiguous() for part, each in stored.items()}
    save_file(tensors, folder / "model.safetensors")
    load_stacked(model, meant)
    return tensors
