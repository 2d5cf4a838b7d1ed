"""Modules are replaced by kernels only if they compute the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import ALL, SMALL, save_reference
from tokenspeed_models_transformers.attention import SERVE
from tokenspeed_models_transformers.compare import rms_norm_eps
from tokenspeed_models_transformers.library import make_model, read_config
from tokenspeed_models_transformers.model import TransformersModel
from tokenspeed_models_transformers.modules import find_gated_mlp
from tokenspeed_models_transformers.projections import RotaryLayout, find_usual_attention
from tokenspeed_models_transformers.recording import RECORD, record
from tokenspeed_models_transformers.residual import passed_arguments
from transformers import GemmaConfig, LlamaConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.granite.modeling_granite import GraniteMLP
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from tokenspeed_models.testing import DenseBuild


def test_norm_with_another_formula_is_left() -> None:
    assert rms_norm_eps(LlamaRMSNorm(16, eps=1e-5)) == 1e-5
    assert rms_norm_eps(torch.nn.RMSNorm(16, eps=1e-5)) == 1e-5
    assert rms_norm_eps(GemmaRMSNorm(16)) is None  # it multiplies by 1 + weight
    assert rms_norm_eps(torch.nn.LayerNorm(16)) is None


@pytest.mark.parametrize(("activation", "matches"), [("silu", True), ("gelu", False)])
def test_mlp_with_another_activation_is_left(activation: str, matches: bool) -> None:
    small = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 1}
    llama = LlamaMLP(LlamaConfig(**small, hidden_act=activation))
    assert (find_gated_mlp(llama) is not None) is matches
    assert find_gated_mlp(GemmaMLP(GemmaConfig(**small, hidden_act="gelu"))) is None


@pytest.mark.parametrize(
    ("model_type", "changes", "num_found"),
    [
        ("llama", {}, 2),
        ("olmoe", {}, 2),
        ("granite", {"residual_multiplier": 0.7}, 0),
        ("glm4", {}, 0),  # norms after its blocks
        ("olmo2", {}, 0),
        ("phi", {}, 0),  # attention and MLP of the same norm
    ],
)
def test_layer_with_other_residual_additions_is_left(
    model_type: str, changes: dict[str, Any], num_found: int
) -> None:
    config = CONFIG_MAPPING[model_type](**{**SMALL, **ALL[model_type], **changes}).to_dict()
    device = torch.device("meta")
    model = make_model(read_config(config), torch.float32, device, SERVE, trusts_code=False)
    found = [passed_arguments(module) for module in model.modules()]
    assert len([each for each in found if each is not None]) == num_found


HALVES = RotaryLayout(is_adjacent=False, interleaved=False)


@pytest.mark.parametrize(
    ("model_type", "changes", "layouts"),
    [
        ("llama", {}, [HALVES, HALVES]),
        ("qwen3", {}, [HALVES, HALVES]),  # with norms of the heads
        ("glm", {}, [RotaryLayout(is_adjacent=False, interleaved=True)] * 2),  # half of each head
        ("cohere", {}, [RotaryLayout(is_adjacent=True, interleaved=True)] * 2),
        ("smollm3", {"no_rope_layers": [1, 0]}, [HALVES, None]),
        ("olmo", {"clip_qkv": None}, [HALVES, HALVES]),
        ("olmo", {"clip_qkv": 500.0}, []),
        ("olmo2", {}, []),  # norms of all heads at once
        ("cohere_compass_text", {}, []),  # rotates only if there are cosines and sines
        ("gpt2", {}, []),
    ],
)
def test_attention_with_another_formula_is_left(
    model_type: str, changes: dict[str, Any], layouts: list[RotaryLayout | None]
) -> None:
    config = CONFIG_MAPPING[model_type](**{**SMALL, **ALL[model_type], **changes}).to_dict()
    device = torch.device("meta")
    recording, model = (
        make_model(read_config(config), torch.float32, device, name, trusts_code=False)
        for name in (RECORD, SERVE)
    )
    recorded = record(recording)
    found = find_usual_attention(model, recorded.decoder, recorded.attention)
    assert [each.layout for each in found.values()] == layouts


def test_kernels_get_the_shapes_of_the_model(tmp_path: Path) -> None:
    save_reference("qwen3_moe", tmp_path)
    build = DenseBuild()
    TransformersModel(json.loads((tmp_path / "config.json").read_text()), build)
    ops = [op for op, _ in build.problems]
    assert ops.count("attention") == ops.count("moe_experts") == 2
    assert ops.count("add_rms_norm") == 2
    problems = [problem for op, problem in build.problems if op == "moe_experts"]
    assert problems[0] == {
        "num_experts": 6,
        "top_k": 2,
        "hidden_size": 32,
        "intermediate_size": 768,
        "dtype": "float32",
    }


@pytest.mark.parametrize(
    ("model_type", "mlp", "changes", "found"),
    [
        (
            "llama",
            LlamaMLP,
            {},
            "LlamaForCausalLM .* in two chunks differ by .* those of transformers in one pass",
        ),
        ("granite", GraniteMLP, {"is_causal": False}, "in three chunks differ by .* those in two"),
    ],
)
def test_mixing_of_tokens_outside_of_attention_is_found(
    model_type: str,
    mlp: Any,
    changes: dict[str, Any],
    found: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_reference(model_type, tmp_path, **changes)
    weights = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    TransformersModel(config, DenseBuild()).load_weights(weights.items())
    original = mlp.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        before = torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        mixed: torch.Tensor = original(self, x + before)
        return mixed

    monkeypatch.setattr(mlp, "forward", forward)
    with pytest.raises(ValueError, match=found):
        TransformersModel(config, DenseBuild()).load_weights(weights.items())


def test_other_logits_are_found(tmp_path: Path) -> None:
    save_reference("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    model = TransformersModel(config, DenseBuild())
    head: Any = model._causal_lm.lm_head
    original = head.forward
    head.forward = lambda x: original(x) * 1.1
    with pytest.raises(ValueError, match=r"LlamaForCausalLM .* logits differ by .* output head"):
        model.load_weights(load_file(tmp_path / "model.safetensors").items())
