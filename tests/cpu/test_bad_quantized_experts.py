"""Defects of quantized checkpoints with experts are named in one line, in every form."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import block_scaled
import fine_grained
import pytest
import torch
from integer_checkpoints import SIZES, Stored, store
from quantized_build import TOKENS, read_schemes
from quantized_forms import QUANTIZED_INPUTS, WEIGHT_ONLY, SchemeBuild
from tiny_families import save_reference
from torch import Tensor

from tokenspeed_core.targets import load_target
from tokenspeed_models.descriptors import QWEN3_MOE

MOE = {"num_experts": 3, "moe_intermediate_size": 32, "mlp_only_layers": []}
EXPERT = "model.layers.1.mlp.experts.2"
ROUTER = "model.layers.1.mlp.gate.weight"
# The scale of each form, and the function that makes it that of another block size, group size or strategy.
SCALES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "awq": ("scales", lambda scale: scale[:1]),
    "gptq": ("scales", lambda scale: scale[:1]),
    "gptq desc_act": ("scales", lambda scale: scale[:1]),
    "AutoRound": ("scales", lambda scale: scale[:1]),
    "W4A16": ("weight_scale", lambda scale: scale[:, :1]),
    "MXFP4A16": ("weight_scale", lambda scale: scale[:, :1]),
    "FP8 dynamic": ("weight_scale", lambda scale: scale.expand(32)),
    "FP8 static": ("weight_scale", lambda scale: scale.expand(32)),
    "W8A8": ("weight_scale", lambda scale: scale[:1]),
    "W8A8 static": ("weight_scale", lambda scale: scale[:1]),
    "fp8-block": ("weight_scale_inv", lambda scale: scale[:, :1]),
    "mxfp8": ("weight_scale", lambda scale: scale[:, :1]),
    "nvfp4": ("weight_scale", lambda scale: scale[:, :1]),
}


def write(form: str, folder: Path) -> tuple[dict[str, Any], Stored]:
    """Write a checkpoint; return its settings and tensors."""
    if form == "fp8-block":
        sizes = {**fine_grained.SIZES, **MOE, "moe_intermediate_size": 128}
        settings = {**fine_grained.STORED, "modules_to_not_convert": ["gate"]}
        reference = save_reference("Qwen3Moe", folder, **sizes, num_hidden_layers=2)
        return settings, fine_grained.store(folder, reference, settings=settings)
    if form in block_scaled.FORMATS:
        reference = save_reference("Qwen3Moe", folder, **{**MOE, **block_scaled.SIZES})
        tensors = block_scaled.store(folder, reference, form, "compressed-tensors", TOKENS)
        return block_scaled.compressed_config(form), tensors
    settings, quantize, *_ = {**WEIGHT_ONLY, **QUANTIZED_INPUTS}[form]
    reference = save_reference("Qwen3Moe", folder, **{**SIZES, **MOE})
    return settings, store(folder, reference, settings, quantize)


@pytest.mark.parametrize("form", SCALES)
def test_defect_is_named_in_one_line(form: str, tmp_path: Path) -> None:
    settings, tensors = write(form, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    model = load_target(QWEN3_MOE.load)(config, SchemeBuild(read_schemes(settings)[1]))
    name, other_size = SCALES[form]
    scale = f"{EXPERT}.up_proj.{name}"

    def error(changes: dict[str, Tensor | None]) -> str:
        given = {key: each for key, each in {**tensors, **changes}.items() if each is not None}
        with pytest.raises(ValueError, match="do not match its config") as caught:
            model.load_weights(given.items())
        return str(caught.value)

    expert = [key for key in tensors if key.startswith(f"{EXPERT}.")]
    messages = [error(dict.fromkeys(expert))]
    assert all(f"{EXPERT}.{part}" in messages[0] for part in ("gate_proj", "up_proj", "down_proj"))
    messages.append(error({scale: None}))
    assert f"missing: {scale}" in messages[1]
    messages.append(error({scale: other_size(tensors[scale])}))
    assert f"{scale} has shape" in messages[2]
    messages.append(error({ROUTER: torch.ones(2, tensors[ROUTER].shape[1])}))
    assert f"{ROUTER} has shape [2, " in messages[3]
    assert not any("\n" in message for message in messages)
    model.load_weights(tensors.items())
