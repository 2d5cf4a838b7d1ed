"""Fine-grained FP8 checkpoints, quantized and dequantized by transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

BLOCK = 128
STORED = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
_QUANTIZED = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.08,
}


def quantized(weight: Tensor, rows: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Return a weight [O, I] in FP8 and a scale for each block of `rows` x 128 values."""
    config = FineGrainedFP8Config(weight_block_size=(rows, BLOCK))
    made = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"x.weight": weight})
    return made["x.weight"], made["x.weight_scale_inv"]


def values(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the dequantized values, float32."""
    found: Tensor = Fp8Dequantize(None).convert(
        {"weight": [codes], "weight_scale_inv": [scale.float()]}
    )["weight"]
    return found


def stacked_experts(model: nn.Module) -> dict[str, Tensor]:
    """Return the experts of a model in FP8 with their scales, stacked and named as transformers stores them."""
    quantize = Fp8Quantize(SimpleNamespace(quantization_config=FineGrainedFP8Config()))
    found: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        if ".experts." in name:
            found.update(quantize.convert({name: weight.detach()}))
    return found


def store(
    folder: Path,
    model: Any,
    scale_dtype: torch.dtype = torch.float32,
    settings: Mapping[str, Any] = STORED,
) -> dict[str, Tensor]:
    """Quantize a checkpoint on disk and load the dequantized weights into its model; return the stored tensors."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    tensors, dequantized = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors[name] = tensor
        if name.endswith(_QUANTIZED):
            codes, scale = quantized(tensor)
            tensors[name], tensors[f"{name}_scale_inv"] = codes, scale.to(scale_dtype)
            dequantized[name] = values(codes, tensors[f"{name}_scale_inv"])
    save_file(tensors, folder / "model.safetensors")
    with torch.no_grad():
        for name in [name for name in dequantized if ".experts." in name]:
            _fill_expert(model, name, dequantized.pop(name))
    assert not model.load_state_dict(dequantized, strict=False).unexpected_keys
    return tensors


def _fill_expert(model: nn.Module, name: str, weight: Tensor) -> None:
    """Copy the weight of one expert into the parameter of all experts."""
    experts, _, rest = name.replace("block_sparse_moe", "mlp").partition(".experts.")
    expert, projection, _ = rest.split(".")
    is_down = projection in ("down_proj", "w2")
    stacked = "down_proj" if is_down else "gate_up_proj"
    target = model.get_parameter(f"{experts}.experts.{stacked}")[int(expert)]
    if not is_down:
        target = target.chunk(2)[projection in ("up_proj", "w3")]
    target.copy_(weight)


def quantize_inputs(model: nn.Module) -> None:
    """Make a model quantize the inputs of all linear layers but the head."""

    def rounded(module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        x = inputs[0]
        return values(*quantized(x.reshape(-1, x.shape[-1]), rows=1)).reshape(x.shape)

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            hook: Callable[..., Any] = rounded
            module.register_forward_pre_hook(hook)
