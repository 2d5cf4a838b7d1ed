"""Llama 4: configurations, names of weights, quantized experts and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from quantized_build import (
    TOKENS,
    QuantizedBuild,
    checkpoint_logits,
    read_schemes,
    relative,
    transformers_logits,
)
from quantized_forms import QUANTIZED_INPUTS, SchemeBuild
from safetensors.torch import load_file, save_file
from tiny_families import save_reference
from tokenspeed_models_llama4 import LLAMA4, LLAMA4_MULTIMODAL
from tokenspeed_models_llama4.describe import describe_llama4, describe_llama4_multimodal
from tokenspeed_models_llama4.model import Llama4ForCausalLM
from tokenspeed_quantization.schemes import FP8
from torch import Tensor

from tokenspeed_core.api import FullAttention, SlidingWindow
from tokenspeed_models.testing import DenseBuild, sequence_logits

SCOUT: dict[str, Any] = {
    "attn_temperature_tuning": 4,
    "max_position_embeddings": 10_485_760,
    "no_rope_layers": [],
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 1.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "num_local_experts": 16,
    "torch_dtype": "bfloat16",
}
MAVERICK: dict[str, Any] = {
    "interleave_moe_layer_step": 2,
    "max_position_embeddings": 1_048_576,
    "num_local_experts": 128,
    "use_qk_norm": False,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize("config", [SCOUT, MAVERICK], ids=["Scout", "Maverick"])
def test_published_sizes_are_described(config: dict[str, Any]) -> None:
    info = describe_llama4_multimodal({"text_config": config})
    sizes = {
        key: config[key]
        for key in ("num_local_experts", "interleave_moe_layer_step")
        if key in config
    }
    with torch.device("meta"):
        model = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**sizes))
    assert info.num_parameters == sum(each.numel() for each in model.parameters())
    assert info.max_model_len == config["max_position_embeddings"]
    assert (info.architecture, info.dtype) == ("Llama4ForConditionalGeneration", "bfloat16")
    assert info.cache_groups == (
        FullAttention("full", 12, 8, 128),
        SlidingWindow("window", 36, 8, 128, 8192),
    )


def test_language_model_of_a_multimodal_checkpoint_is_read(tmp_path: Path) -> None:
    reference = save_reference("Llama4", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    tensors = load_file(tmp_path / "model.safetensors")
    named = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    named["vision_model.class_embedding"] = torch.ones(4)
    named["multi_modal_projector.linear_1.weight"] = torch.ones(4, 4)
    save_file(named, tmp_path / "model.safetensors")
    found = checkpoint_logits(LLAMA4_MULTIMODAL, tmp_path, DenseBuild())
    torch.testing.assert_close(found, transformers_logits(reference), rtol=1e-4, atol=1e-4)


def by_expert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's tensors with one for each projection of an expert, as llm-compressor stores them."""
    found = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if not module.endswith(".experts"):
            found[name] = tensor
            continue
        for expert, weight in enumerate(tensor):
            layers = {"down_proj": weight}
            if kind == "gate_up_proj":
                layers = dict(zip(("gate_proj", "up_proj"), weight.chunk(2, dim=1), strict=True))
            for layer, part in layers.items():
                found[f"{module}.{expert}.{layer}.weight"] = part.t().contiguous()
    return found


@pytest.mark.parametrize("form", [None, "FP8 dynamic"])
def test_experts_may_be_stored_one_by_one(form: str | None, tmp_path: Path) -> None:
    reference = save_reference("Llama4", tmp_path)
    tensors = by_expert(load_file(tmp_path / "model.safetensors"))
    expected = transformers_logits(reference)
    config = json.loads((tmp_path / "config.json").read_text())
    if form is None:
        save_file(tensors, tmp_path / "model.safetensors")
        found = checkpoint_logits(LLAMA4, tmp_path, DenseBuild())
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        return
    settings, quantize, _ = QUANTIZED_INPUTS[form]
    given = {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            given[name] = tensor
            continue
        stored, _ = quantize(tensor)
        given |= {f"{name.removesuffix('.weight')}.{part}": each for part, each in stored.items()}
    build = SchemeBuild(read_schemes(settings)[1])
    model = Llama4ForCausalLM(config, build)
    model.load_weights(given.items())
    assert {"moe_experts_fp8"} <= {op for op, _ in build.problems}
    found = sequence_logits(model, build, TOKENS)
    assert 1e-3 < relative(found, expected) < 0.3


def test_stacked_experts_are_quantized_on_load(tmp_path: Path) -> None:
    expected = transformers_logits(save_reference("Llama4", tmp_path))
    found = checkpoint_logits(LLAMA4, tmp_path, QuantizedBuild(FP8))
    assert 1e-3 < relative(found, expected) < 0.3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 2}, "num_experts_per_tok is 2"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries"),
        ({"layer_types": ["sliding_attention"] * 48}, "layer_types is"),
        ({"layer_types": [["full_attention"]] * 48}, "layer_types is"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_unsupported_value_is_named_by_its_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        describe_llama4({**SCOUT, **changes})


def test_bad_checkpoint_is_refused_in_one_line(tmp_path: Path) -> None:
    save_reference("Llama4", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    experts, router = (
        f"model.layers.1.feed_forward.{name}" for name in ("experts.down_proj", "router.weight")
    )
    tensors[experts] = tensors[experts][:-1].clone()
    tensors[router] = tensors[router][:-1].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"{router} has shape") as caught:
        checkpoint_logits(LLAMA4, tmp_path, DenseBuild())
    message = str(caught.value)
    assert "experts.down_proj has shape [4, 64, 24], expected [5, 64, 24]" in message
    assert "\n" not in message
