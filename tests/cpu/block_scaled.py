"""MXFP8 and NVFP4 checkpoints, quantized and read back by compressed-tensors, in its format or ModelOpt's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

FORMATS = {"mxfp8": "mxfp8-quantized", "nvfp4": "nvfp4-pack-quantized"}
GROUPS = {"mxfp8": 32, "nvfp4": 16}
# quantization_config as NVIDIA ModelOpt 0.41 writes it
MODELOPT: dict[str, dict[str, Any]] = {
    form: {
        "ignore": ["lm_head"],
        "quant_algo": form.upper(),
        "producer": {"name": "modelopt", "version": "0.41.0"},
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "quant_method": "modelopt",
    }
    for form in FORMATS
}
MODELOPT["nvfp4"]["config_groups"] = {
    "group_0": {
        "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
        "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
        "targets": ["Linear"],
    }
}
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "initializer_range": 0.08,
}
_STACKED = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
}


def compressed_config(form: str) -> dict[str, Any]:
    """Return the `quantization_config` that llm-compressor writes."""
    scheme = preset_name_to_scheme(form.upper(), ["Linear"]).model_dump(mode="json")
    return {
        "config_groups": {"group_0": scheme},
        "format": FORMATS[form],
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def compressed(form: str, weight: Tensor, largest: float | None = None) -> dict[str, Tensor]:
    """Return the tensors that compressed-tensors stores for a weight [O, I].

    `largest` is the largest magnitude of all weights that share the per-tensor scale.
    """
    scheme = preset_name_to_scheme(form.upper(), ["Linear"])
    groups = weight.float().unflatten(1, (-1, GROUPS[form]))
    state, options = {"weight": weight.float()}, {}
    if form == "nvfp4":
        bound = (
            weight.abs().max().float().reshape(1) if largest is None else torch.tensor([largest])
        )
        state["weight_global_scale"] = options["global_scale"] = generate_gparam(-bound, bound)
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights, **options)
    state["weight_scale"] = scale
    stored: dict[str, Tensor] = _compressor(form).compress(state, scheme)
    return stored


def decompressed(form: str, stored: dict[str, Tensor]) -> Tensor:
    """Return the weight that compressed-tensors reads, in float32 (its default is bfloat16)."""
    scheme, scale = preset_name_to_scheme(form.upper(), ["Linear"]), stored["weight_scale"]
    if form == "mxfp8":
        codes, scale = stored["weight"], decompress_mx_scale(scale)
    else:
        rows, half = stored["weight_packed"].shape
        codes = unpack_fp4_from_uint8(stored["weight_packed"], rows, 2 * half, torch.float32)
    weight: Tensor = dequantize(
        codes,
        scale.float(),
        args=scheme.weights,
        global_scale=stored.get("weight_global_scale"),
        dtype=torch.float32,
    )
    return weight


def _compressor(form: str) -> Any:
    return BaseCompressor.get_value_from_registry(FORMATS[form])


def by_modelopt(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of compressed-tensors under the names that ModelOpt uses."""
    names = {
        "weight_packed": "weight",
        "weight_global_scale": "weight_scale_2",
        "input_global_scale": "input_scale",
    }
    found = {}
    for name, tensor in stored.items():
        *parents, leaf = name.split(".")
        value = (1 / tensor).squeeze() if leaf.endswith("global_scale") else tensor
        found[".".join((*parents, names.get(leaf, leaf)))] = value
    return found


def store(
    folder: Path,
    model: nn.Module,
    form: str,
    writer: str,
    token_ids: list[int],
    *,
    unquantized: str = "nothing",
    **changes: Any,
) -> dict[str, Tensor]:
    """Quantize a checkpoint on disk and load the dequantized weights into its model; return the stored tensors.

    The activations of `token_ids` calibrate the input scales. Weights that the regular expression `unquantized` finds
    are not quantized; `changes` to quantization_config must say so.
    """
    ranges = _ranges(model, token_ids) if form == "nvfp4" else {}
    tensors, dequantized, largest = load_file(folder / "model.safetensors"), {}, {}
    linear = [
        name.removesuffix(".weight")
        for name in tensors
        if name.endswith("_proj.weight") and not re.search(unquantized, name)
    ]
    for name in linear:
        weight = tensors[f"{name}.weight"]
        largest[_shared_scale(name)] = max(
            largest.get(_shared_scale(name), 0.0), float(weight.abs().max())
        )
    for name in linear:
        stored = compressed(form, tensors.pop(f"{name}.weight"), largest[_shared_scale(name)])
        dequantized[f"{name}.weight"] = decompressed(form, stored)
        if form == "nvfp4":
            bound = torch.tensor([ranges.get(name, 6.0)])
            stored["input_global_scale"] = generate_gparam(-bound, bound)
        stored = by_modelopt(stored) if writer == "modelopt" else stored
        tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in stored.items()}
    if writer == "modelopt":
        tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(0.5)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    written = MODELOPT[form] if writer == "modelopt" else compressed_config(form)
    config["quantization_config"] = {**written, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    load_stacked(model, dequantized)
    return tensors


def _shared_scale(name: str) -> str:
    """Return a name for the projections that are stacked with this one, which share a per-tensor scale."""
    parent, _, leaf = name.rpartition(".")
    return f"{parent}.{_STACKED.get(leaf, leaf)}"


def _ranges(model: nn.Module, token_ids: list[int]) -> dict[str, float]:
    """Return the largest magnitude of each linear layer's input."""
    ranges: dict[str, float] = {}

    def watch(name: str) -> Callable[..., None]:
        def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            ranges[name] = float(inputs[0].abs().max())

        return record

    hooks = [
        module.register_forward_pre_hook(watch(name))
        for name, module in model.named_modules()
        if name.endswith("_proj") and isinstance(module, nn.Linear)
    ]
    with torch.inference_mode():
        model(torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    return ranges


def load_stacked(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load weights into a model, which stacks those of experts."""
    state = model.state_dict()
    with torch.no_grad():
        for name, weight in weights.items():
            parent, _, rest = name.replace("block_sparse_moe", "mlp").partition(".experts.")
            if name in state:
                state[name].copy_(weight)
                continue
            expert, projection, _ = rest.split(".")
            projection = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(
                projection, projection
            )
            stacked = "down_proj" if projection == "down_proj" else "gate_up_proj"
            held = state[f"{parent}.experts.{stacked}"][int(expert)]
            half = held.shape[0] // 2
            rows = {
                "gate_proj": slice(half),
                "up_proj": slice(half, None),
                "down_proj": slice(None),
            }[projection]
            held[rows].copy_(weight)
