"""Weights of checkpoints in the published layout reach the parameters of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import save_reference
from tokenspeed_models_transformers.model import TransformersModel

from tokenspeed_models.loading.dummy import read_dummy
from tokenspeed_models.testing import DenseBuild, sequence_logits

TOKENS = [5, 90, 17, 33, 2, 8, 64, 41, 12]


def build(folder: Path) -> tuple[TransformersModel, DenseBuild, dict[str, torch.Tensor]]:
    """Return a model without weights, its build, and the checkpoint's tensors."""
    context = DenseBuild()
    config = json.loads((folder / "config.json").read_text())
    return TransformersModel(config, context), context, load_file(folder / "model.safetensors")


def check_logits(model: TransformersModel, context: DenseBuild, reference: Any) -> None:
    """Compare logits, computed in chunks, with those of transformers."""
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKENS])).logits[0]
        found = sequence_logits(model, context, TOKENS, 4)
    assert torch.allclose(found, expected, atol=1e-4)


def test_experts_of_a_checkpoint_are_merged(tmp_path: Path) -> None:
    reference = save_reference("qwen3_moe", tmp_path)
    model, context, weights = build(tmp_path)
    assert any(".experts.5.up_proj.weight" in name for name in weights)
    # In any order: layer and expert 10 come before 2 in some files.
    model.load_weights(sorted(weights.items(), reverse=True))
    check_logits(model, context, reference)


def test_checkpoint_without_the_prefix_of_its_decoder_loads(tmp_path: Path) -> None:
    reference = save_reference("gpt2", tmp_path)
    model, context, weights = build(tmp_path)
    assert "lm_head.weight" not in weights
    model.load_weights((name.removeprefix("transformer."), each) for name, each in weights.items())
    check_logits(model, context, reference)


@pytest.mark.parametrize("stored", ["model.embed_tokens.weight", "lm_head.weight"])
def test_tied_weight_may_have_either_name(stored: str, tmp_path: Path) -> None:
    reference = save_reference("llama", tmp_path)
    model, context, weights = build(tmp_path)
    weights[stored] = weights.pop("model.embed_tokens.weight")
    model.load_weights(weights.items())
    check_logits(model, context, reference)


def test_wrong_weights_are_named(tmp_path: Path) -> None:
    save_reference("qwen3_moe", tmp_path)
    model, _, weights = build(tmp_path)
    del weights["model.layers.0.self_attn.q_norm.weight"]
    weights["model.layers.0.mlp.gate.weight"] = torch.ones(2, 2)
    weights["model.extra"] = torch.ones(2)
    with pytest.raises(ValueError, match="do not match its") as caught:
        model.load_weights(weights.items())
    message = str(caught.value)
    assert "missing: model.layers.0.self_attn.q_norm.weight" in message
    assert "unexpected: model.extra" in message
    assert "model.layers.0.mlp.gate.weight has shape [2, 2], expected [6, 32]" in message


def test_stacked_projections_of_a_checkpoint_are_split(tmp_path: Path) -> None:
    reference = save_reference("sarvam_moe", tmp_path)
    model, context, weights = build(tmp_path)
    assert "model.layers.0.attention.query_key_value.weight" in weights
    model.load_weights(weights.items())
    check_logits(model, context, reference)


def test_missing_expert_is_an_error_of_its_layer(tmp_path: Path) -> None:
    save_reference("qwen3_moe", tmp_path)
    model, _, weights = build(tmp_path)
    del weights["model.layers.1.mlp.experts.3.up_proj.weight"]
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts.* from its 11 tensors"):
        model.load_weights(weights.items())
    for name in ("up_proj", "gate_proj", "down_proj"):
        weights.pop(f"model.layers.1.mlp.experts.3.{name}.weight", None)
    with pytest.raises(ValueError, match=r"gate_up_proj has shape \[5, 1536, 32\]"):
        model.load_weights(weights.items())


def test_dummy_weights_fill_all_parameters(tmp_path: Path) -> None:
    save_reference("olmoe", tmp_path)
    model, context, _ = build(tmp_path)
    model.load_weights(read_dummy("", model, lambda done, total: None))
    with torch.inference_mode():
        assert sequence_logits(model, context, TOKENS).isfinite().all()
