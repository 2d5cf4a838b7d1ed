"""The published layout of DFlash drafters: what is read, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_reference import PUBLISHED, TARGET, Reference
from tiny_families import save_reference
from torch import Tensor

from tokenspeed_core import LLM
from tokenspeed_core.api import DraftCheckpoint, DraftRequest
from tokenspeed_core.errors import CheckpointError, ConfigError
from tokenspeed_models.describe import describe_qwen3
from tokenspeed_models.descriptors import QWEN3
from tokenspeed_models.drafters.dflash import DFlashDrafter
from tokenspeed_models.drafters.dflash_config import DFlashConfig, check, plan, read_dflash
from tokenspeed_models.families.qwen3 import Qwen3ForCausalLM
from tokenspeed_models.layers import CausalLM
from tokenspeed_models.testing import DenseBuild

Json = dict[str, Any]
NUM_LAYERS, VOCAB = TARGET["num_hidden_layers"], TARGET["vocab_size"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a target."""
    path = tmp_path_factory.mktemp("target")
    save_reference("Qwen3", path, **TARGET)
    return path


@pytest.fixture(scope="module")
def target_config(folder: Path) -> Json:
    config: Json = json.loads((folder / "config.json").read_text())
    return config


@pytest.fixture(scope="module")
def target(target_config: Json) -> CausalLM:
    return Qwen3ForCausalLM(target_config, DenseBuild())


def changed(changes: Json) -> Json:
    """Return the published configuration with changes; None removes a key, "dflash_config." starts a nested one."""
    config = {**PUBLISHED, "dflash_config": dict(PUBLISHED["dflash_config"])}
    for key, value in changes.items():
        nested = key.startswith("dflash_config.")
        part = config["dflash_config"] if nested else config
        part[key.removeprefix("dflash_config.")] = value
    return config


def read(config: Json = PUBLISHED, max_model_len: int = 64) -> DFlashConfig:
    return read_dflash(
        config,
        num_target_layers=NUM_LAYERS,
        target_vocab_size=VOCAB,
        max_model_len=max_model_len,
    )


def request(folder: Path, target: Json, config: Json) -> DraftRequest:
    return DraftRequest(
        DraftCheckpoint(folder, target, QWEN3, describe_qwen3(target)),
        DraftCheckpoint(folder / "drafter", config, None, None),
        {},
    )


def test_plan_describes_the_drafter(tmp_path: Path, target_config: Json) -> None:
    info = plan(request(tmp_path, target_config, PUBLISHED))
    assert info.num_parameters == sum(each.numel() for each in Reference().parameters())
    assert info.weights == tmp_path / "drafter"
    assert (info.mask_token_id, info.max_drafts) == (7, 5)
    # Outputs of the layers 2 and 0, in the order of the columns of `fc`.
    assert info.layers == (3, 1)
    (group,) = info.cache_groups
    assert group.num_layers == info.num_layers == 2


def test_values_outside_the_nested_object_are_read() -> None:
    nested = {"block_size": 9, "mask_token_id": 4, "target_layer_ids": [1]}
    c = read({**PUBLISHED, "dflash_config": nested})
    assert (c.block_size, c.mask_token_id, c.layers) == (9, 4, (2,))
    assert read({**PUBLISHED, "dflash_config": {}, **nested}) == c


def test_positions_beyond_those_of_the_training_are_rotated() -> None:
    assert read(max_model_len=4096).decoder.rope.max_positions == 4096


WRONG_CONFIGS: tuple[tuple[Json, str], ...] = (
    ({"architectures": ["Qwen3ForCausalLM"]}, "architectures"),
    ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
    ({"dflash_config": None}, "dflash_config"),
    ({"hidden_size": 32}, "hidden size 32"),
    ({"target_hidden_size": 128}, "target_hidden_size is 128"),
    ({"vocab_size": 128}, "vocab_size is 128"),
    ({"num_target_layers": 5}, "num_target_layers is 5"),
    ({"block_size": None}, "block_size is missing"),
    ({"block_size": 1}, "block_size is 1"),
    ({"block_size": "16"}, "block_size is '16'"),
    ({"dflash_config.mask_token_id": None}, "mask_token_id is None"),
    ({"dflash_config.mask_token_id": VOCAB}, "mask_token_id is 8"),
    ({"dflash_config.mask_token_id": -1}, "mask_token_id is -1"),
    ({"dflash_config.target_layer_ids": None}, "target_layer_ids is missing"),
    ({"dflash_config.target_layer_ids": []}, "target_layer_ids is missing"),
    ({"dflash_config.target_layer_ids": ["1"]}, "target_layer_ids"),
    ({"dflash_config.target_layer_ids": [0, 3]}, "layers 0, 3"),
    ({"dflash_config.target_layer_ids": [-1, 2]}, "layers -1, 2"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ({"layer_types": "full"}, "layer_types"),
    ({"layer_types": [["full_attention"]]}, "layer_types"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ({"is_causal": True}, "is_causal"),
    ({"dflash_config.causal": True}, r"dflash_config\.causal"),
    ({"dflash_config.use_swa": True}, "use_swa"),
    ({"dflash_config.projector_type": "domino"}, "projector_type"),
    ({"dflash_config.selector_rank": 64}, "selector_rank"),
    ({"dflash_config.final_logit_softcapping": 20.0}, "final_logit_softcapping"),
    ({"input_embedding_scale": 2.0}, "input_embedding_scale"),
)


@pytest.mark.parametrize(("changes", "named"), WRONG_CONFIGS)
def test_unsupported_drafters_are_refused_in_one_line(
    tmp_path: Path, target_config: Json, changes: Json, named: str
) -> None:
    with pytest.raises(ValueError, match=named) as caught:
        plan(request(tmp_path, target_config, changed(changes)))
    assert "\n" not in str(caught.value)


def test_neutral_values_are_accepted() -> None:
    neutral = {
        "is_causal": False,
        "dflash_config.causal": False,
        "dflash_config.output_multiplier": 1.0,
        "input_embedding_scale": 1,
        "dflash_config.attention_mode": "gqa",
    }
    assert read(changed(neutral)) == read()


def test_options_are_refused() -> None:
    check({})
    with pytest.raises(ValueError, match="layers_to_capture"):
        check({"layers_to_capture": [1, 2]})


def wrong_weights(weights: dict[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield a name that the error must contain, and weights that must be refused."""
    yield "fc.weight", {**weights, "fc.weight": weights["fc.weight"][:, :64]}
    yield "hidden_norm", {name: each for name, each in weights.items() if "hidden_" not in name}
    yield "layers.2.mlp", {**weights, "layers.2.mlp.up_proj.weight": torch.ones(80, 64)}
    yield "lm_head", {**weights, "lm_head.weight": torch.ones(VOCAB, 64)}


def test_wrong_weights_are_refused(target: CausalLM) -> None:
    for named, weights in wrong_weights(Reference().state_dict()):
        drafter = DFlashDrafter({"dflash": read()}, DenseBuild(), target)
        with pytest.raises(ValueError, match=named):
            drafter.load_weights(iter(weights.items()))


def test_drafter_of_another_width_is_refused_when_built(target: CausalLM) -> None:
    c = read()
    narrow = replace(c, decoder=replace(c.decoder, hidden_size=32))
    with pytest.raises(ValueError, match="hidden size 32"):
        DFlashDrafter({"dflash": narrow}, DenseBuild(), target)


def refused(folder: Path, **flags: Any) -> str:
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        LLM(model=str(folder), device="cpu", skip_tokenizer_init=True, **flags)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_unusable_settings_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    Reference().save(tmp_path / "drafter")
    drafter = str(tmp_path / "drafter")
    named = {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": drafter}
    assert "--speculative-draft-model-path" in refused(folder, speculative_algorithm="dflash")
    assert "eagle_topk" in refused(folder, **named, speculative_eagle_topk=2)
    assert "layers_to_capture" in refused(folder, **named, eagle3_layers_to_capture="1")
    assert "at most 5" in refused(folder, **named, speculative_num_steps=6)
    assert "at most 5" in refused(folder, **named, speculative_num_draft_tokens=7)
    config = {"method": "dflash", "model": drafter, "num_speculative_tokens": 6}
    assert "at most 5" in refused(folder, speculative_config=config)
    assert "no option window" in refused(
        folder, speculative_config={"method": "dflash", "model": drafter, "window": 1}
    )
    assert "architectures" in refused(
        folder, speculative_config={"method": "dflash", "model": str(folder)}
    )
    (tmp_path / "drafter" / "model.safetensors").unlink()
    assert "safetensors" in refused(folder, **named)
