"""The layer for multi-token prediction of GLM checkpoints, against the layers of transformers."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from drafted import draft_in_every_step
from quantized_build import TOKENS, load
from safetensors.torch import load_file, save_file
from tiny_families import save_reference
from tokenspeed_models_deepseek import GLM4_MOE_LITE
from tokenspeed_models_glm import GLM4_MOE
from torch import Tensor
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer, Glm4MoeRMSNorm
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import (
    Glm4MoeLiteDecoderLayer,
    Glm4MoeLiteRMSNorm,
)

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.api import ModelSpec
from tokenspeed_core.errors import CheckpointError, ConfigError
from tokenspeed_core.targets import load_target
from tokenspeed_models.testing import DenseBuild

NAME = "model.layers.3"
TWO_PROCESSES = {"tensor_parallel_size": 2, "enable_expert_parallel": True}


@dataclass(frozen=True)
class Family:
    """A family, the modules of transformers in a draft layer, and the key for the number of such layers."""

    spec: ModelSpec
    layer: Any
    norm: Any
    num_draft_layers: str


FAMILIES = {
    "Glm4Moe": Family(GLM4_MOE, Glm4MoeDecoderLayer, Glm4MoeRMSNorm, "num_mtp_layers"),
    "Glm4MoeLite": Family(
        GLM4_MOE_LITE, Glm4MoeLiteDecoderLayer, Glm4MoeLiteRMSNorm, "num_nextn_predict_layers"
    ),
}


def make_layer(family: str, config: Any) -> Any:
    """Return a layer of transformers with experts, after the model's last layer."""
    config = deepcopy(config)
    if family == "Glm4MoeLite":
        config.mlp_layer_types.append("sparse")
    return FAMILIES[family].layer(config, config.num_hidden_layers)


def save_with_draft_layer(family: str, folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """Write a checkpoint in the published layout, and return its transformers model and the draft layer's weights."""
    reference = save_reference(family, folder, **{FAMILIES[family].num_draft_layers: 1})
    hidden = reference.config.hidden_size
    layer = make_layer(family, reference.config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    layer.mlp.gate.e_score_correction_bias.uniform_(-0.2, 0.2)
    draft = {f"{NAME}.{name}": tensor.detach() for name, tensor in layer.state_dict().items()}
    draft |= {
        f"{NAME}.eh_proj.weight": 0.1 * torch.randn(hidden, 2 * hidden),
        f"{NAME}.enorm.weight": torch.rand(hidden) + 0.5,
        f"{NAME}.hnorm.weight": torch.rand(hidden) + 0.5,
        f"{NAME}.shared_head.norm.weight": torch.rand(hidden) + 0.5,
        f"{NAME}.shared_head.head.weight": reference.lm_head.weight.detach().clone(),
        f"{NAME}.embed_tokens.weight": reference.model.embed_tokens.weight.detach().clone(),
    }
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, **published(draft)}, folder / "model.safetensors")
    return reference, draft


def published(draft: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights with one tensor for each projection of each expert."""
    found = {}
    for name, tensor in draft.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                for kind, part in zip(("gate", "up"), both.chunk(2), strict=True):
                    expert_name = name.replace("gate_up_proj", f"{expert}.{kind}_proj.weight")
                    found[expert_name] = part.clone()
        elif name.endswith("experts.down_proj"):
            for expert, part in enumerate(tensor):
                found[name.replace("down_proj", f"{expert}.down_proj.weight")] = part.clone()
        else:
            found[name] = tensor
    return found


def reference_logits(
    family: str, reference: Any, draft: dict[str, Tensor], token_ids: list[int]
) -> Tensor:
    """Return the logits of the layer for all tokens but the last, computed by modules of transformers."""
    config, eps = reference.config, reference.config.rms_norm_eps
    layer = make_layer(family, config)
    prefix = f"{NAME}."
    own = {name.removeprefix(prefix): tensor for name, tensor in draft.items()}
    layer.load_state_dict({name: own[name] for name in layer.state_dict()})

    def norm(name: str, x: Tensor) -> Tensor:
        module = FAMILIES[family].norm(config.hidden_size, eps)
        module.load_state_dict({"weight": own[f"{name}.weight"]})
        found: Tensor = module(x)
        return found

    tokens = torch.tensor([token_ids])
    with torch.inference_mode():
        hidden = reference.model(tokens).last_hidden_state[:, :-1]
        embedded = reference.model.embed_tokens(tokens[:, 1:])
        x = torch.cat((norm("enorm", embedded), norm("hnorm", hidden)), dim=-1)
        x = x @ own["eh_proj.weight"].T
        positions = torch.arange(x.shape[1])[None]
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
        rotation = reference.model.rotary_emb(x, positions)
        x = layer.eval()(
            x, attention_mask=mask, position_ids=positions, position_embeddings=rotation
        )
        logits: Tensor = reference.lm_head(norm("shared_head.norm", x))[0]
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_equal_the_layers_of_transformers(family: str, tmp_path: Path) -> None:
    reference, draft = save_with_draft_layer(family, tmp_path)
    build, spec = DenseBuild(), FAMILIES[family].spec
    target = load(spec, tmp_path, build)
    info = spec.plan_mtp(json.loads((tmp_path / "config.json").read_text()), tmp_path)
    not_counted = ("embed_tokens.weight", "shared_head.head.weight", "e_score_correction_bias")
    counted = [tensor for name, tensor in draft.items() if not name.endswith(not_counted)]
    assert info.num_parameters == sum(tensor.numel() for tensor in counted)
    tokens, positions = torch.tensor(TOKENS), torch.arange(len(TOKENS) - 1)
    with torch.inference_mode():
        hidden = target.forward(tokens[:-1], positions)
        build.clear()
        model = load_target(info.load)(info.config, build, target)
        model.load_weights(load_file(tmp_path / "model.safetensors").items())
        found = model.logits(model.forward(tokens[1:], positions, hidden, None))
    expected = reference_logits(family, reference, draft, TOKENS)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "processes"),
    [
        ("Glm4Moe", {}),
        ("Glm4Moe", TWO_PROCESSES),
        ("Glm4MoeLite", {}),
        pytest.param("Glm4MoeLite", TWO_PROCESSES, marks=pytest.mark.release),
    ],
)
def test_draft_layer_changes_no_token(
    family: str, processes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_in_every_step(monkeypatch)
    save_with_draft_layer(family, tmp_path)
    prompts = [{"prompt_token_ids": TOKENS[:length]} for length in (5, 17, 23)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answers = []
    drafting = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}, **processes}
    for settings in ({}, drafting):
        with LLM(
            str(tmp_path),
            device="cpu",
            dtype="float32",
            skip_tokenizer_init=True,
            max_total_tokens=1024,
            **settings,  # type: ignore[arg-type]
        ) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers.append([list(output.outputs[0].token_ids) for output in outputs])
            num_drafted = llm.stats().num_draft_rows
    assert answers[0] == answers[1]
    assert num_drafted > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoint_without_the_layer_is_refused(family: str, tmp_path: Path) -> None:
    save_reference(family, tmp_path, **{FAMILIES[family].num_draft_layers: 0})
    with pytest.raises(ConfigError, match="no layers for multi-token prediction"):
        LLM(str(tmp_path), device="cpu", skip_tokenizer_init=True, speculative_algorithm="mtp")


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_weights_of_the_layer_are_named(family: str, tmp_path: Path) -> None:
    save_reference(family, tmp_path, **{FAMILIES[family].num_draft_layers: 1})
    with pytest.raises(CheckpointError, match=rf"no weights of its layer .* {NAME}\."):
        LLM(
            str(tmp_path),
            device="cpu",
            dtype="float32",
            skip_tokenizer_init=True,
            speculative_algorithm="mtp",
        )
