"""Each family computes the same logits on several processes as on one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from dflash_reference import PUBLISHED, TARGET
from parallel_logits import (
    both_logits,
    count_sent,
    draft_collectives,
    fused_logits,
    logits_of_parts,
    plugin_logits,
    routed_logits,
)
from parallel_table import documented
from plugin_files import ACME_MOE
from process_pool import ProcessPool, Sizes, tensor_parallel
from test_porting_guide import EXAMPLES
from tiny_families import EIGHT_EXPERTS, EXPERTS, FAMILIES, SMALL

from tokenspeed_core.api import ModelSpec
from tokenspeed_core.cli import main
from tokenspeed_core.plugins import Catalog, Selection
from tokenspeed_models.drafters.dflash_config import read_dflash
from tokenspeed_models.drafters.eagle3_config import ARCHITECTURES, read_eagle3

PARALLEL = {
    "tp2": tensor_parallel(2),
    "tp4": tensor_parallel(4),
    "ep2": Sizes(experts=2),
    "tp2+ep2": Sizes(attn=2, dense=2, experts=2),
    "tp4+ep2": Sizes(attn=4, dense=4, moe=2, experts=2),
    "dp2+ep2": Sizes(experts=2, data=2),
    "dp2xtp2+ep4": Sizes(attn=2, dense=2, experts=4, data=2),
}
TABLE = [
    (family, name)
    for family in FAMILIES
    for name in PARALLEL
    if family in EXPERTS or "ep" not in name
]
# Of two processes that divide all layers, `test_fused_all_reduces_give_the_logits_of_one_process` runs each family.
IN_RELEASE = {(family, name) for family, name in TABLE if name in ("tp2", "tp2+ep2")}
# Of the layout with most groups, two families run by default.
IN_RELEASE |= {
    (family, "dp2xtp2+ep4") for family in EXPERTS if family not in ("Qwen3Moe", "DeepseekV3")
}


@cache
def specs() -> Mapping[str, ModelSpec]:
    catalog = Catalog.discover(Selection())
    entries = catalog.entries("models")
    return {entry.name: catalog.load(entry, ModelSpec) for entry in entries}  # type: ignore[misc]


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    keys = {**SMALL, **FAMILIES[family], **EIGHT_EXPERTS.get(family, {}), **changes}
    config = getattr(transformers, f"{family}ForCausalLM").config_class(**keys)
    return dict(config.to_dict())


@pytest.mark.parametrize(
    ("family", "parallelism"),
    [
        pytest.param(*case, marks=pytest.mark.release if case in IN_RELEASE else ())
        for case in TABLE
    ],
)
def test_several_processes_compute_the_logits_of_one(
    family: str, parallelism: str, pool: ProcessPool
) -> None:
    load = specs()[f"{family}ForCausalLM"].load
    results = pool.run(both_logits, PARALLEL[parallelism], load, config_of(family))
    check_logits(results, parallelism)


def check_logits(results: Sequence[Sequence[torch.Tensor]], parallelism: str) -> None:
    """Compare the logits of each process with those of a single process, and with each other."""
    assert len(results) == PARALLEL[parallelism].layout(0).world_size
    for sharded, whole in results:
        torch.testing.assert_close(sharded, whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))
        assert torch.equal(sharded, results[0][0])


FUSED_PER_LAYER = {  # 2 for a family that is not listed
    **dict.fromkeys(("Gemma2", "Gemma3", "Olmo2", "Olmo3"), 0),  # norms follow their blocks
}


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_all_reduces_give_the_logits_of_one_process(family: str, pool: ProcessPool) -> None:
    load, config = specs()[f"{family}ForCausalLM"].load, config_of(family)
    results = pool.run(
        fused_logits, PARALLEL["tp2+ep2" if family in EXPERTS else "tp2"], load, config
    )
    for num_fused, (sharded, whole) in results:
        torch.testing.assert_close(sharded, whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))
        assert torch.equal(sharded, results[0][1][0])
        assert num_fused == FUSED_PER_LAYER.get(family, 2) * config["num_hidden_layers"]


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe", "DeepseekV2"])
def test_outputs_that_are_sent_in_parts_give_the_logits_of_one_process(
    family: str, pool: ProcessPool
) -> None:
    load, config = specs()[f"{family}ForCausalLM"].load, config_of(family)
    parallelism = PARALLEL["tp2+ep2" if family in EXPERTS else "tp2"]
    for limit in (7, 6):  # the larger chunk has 7 tokens
        for num_sent, (sharded, whole) in pool.run(
            logits_of_parts, parallelism, load, config, limit
        ):
            bound = 1e-4 * float(whole.abs().max())
            torch.testing.assert_close(sharded, whole, rtol=1e-4, atol=bound)
            # Experts send their output as a whole.
            num_expected = config["num_hidden_layers"] * (1 if family in EXPERTS else 2)
            assert num_sent >= num_expected if limit == 7 else num_sent == 0


@pytest.mark.parametrize("parallelism", ["tp4", "tp4+ep2", "dp2xtp2+ep4"])
def test_four_processes_fuse_all_reduces(parallelism: str, pool: ProcessPool) -> None:
    load, config = specs()["Qwen3MoeForCausalLM"].load, config_of("Qwen3Moe")
    for num_fused, (sharded, whole) in pool.run(fused_logits, PARALLEL[parallelism], load, config):
        torch.testing.assert_close(sharded, whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))
        assert num_fused > 0


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("Llama", Sizes(attn=4, dense=2)),
        ("Gemma2", Sizes(attn=4, dense=2)),  # its all-reduces are not fused
        ("DeepseekV3", Sizes(attn=4, dense=2, experts=4)),
        ("Llama4", Sizes(dense=2, moe=2, experts=2)),
    ],
    ids=str,
)
def test_copies_of_mlps_give_the_logits_of_one_process(
    family: str, sizes: Sizes, pool: ProcessPool
) -> None:
    load, config = specs()[f"{family}ForCausalLM"].load, config_of(family)
    results = pool.run(fused_logits, sizes, load, config)
    assert len(results) == sizes.layout(0).world_size
    for _, (sharded, whole) in results:
        torch.testing.assert_close(sharded, whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))
        assert torch.equal(sharded, results[0][1][0])


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(experts=2, data=2),
        pytest.param(Sizes(attn=2, dense=2, experts=4, data=2), marks=pytest.mark.release),
        pytest.param(Sizes(attn=2, dense=2, moe=2, experts=2, data=2), marks=pytest.mark.release),
    ],
    ids=str,
)
def test_routed_tokens_give_the_logits_of_one_process(
    family: str, sizes: Sizes, pool: ProcessPool
) -> None:
    load = specs()[f"{family}ForCausalLM"].load
    for routed, whole in pool.run(routed_logits, sizes, load, config_of(family)):
        torch.testing.assert_close(routed, whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))


def test_tokens_are_sent_only_to_the_processes_of_their_experts(pool: ProcessPool) -> None:
    for sent, needed in pool.run(count_sent, Sizes(experts=4, data=4), 16, 2):
        assert 0 < sent == needed < 3 * 40  # an all-gather sends each token to the three others


@pytest.mark.parametrize("parallelism", ["tp2", "tp4"])
def test_new_family_gives_the_logits_of_one_process(
    parallelism: str, pool: ProcessPool, tmp_path: Path
) -> None:
    assert main(["plugins", "new", "model", "acme", "--path", str(tmp_path)]) == 0
    config = json.loads((tmp_path / "acme_model" / "example" / "config.json").read_text())
    family = (str(tmp_path), "acme_model.model:AcmeForCausalLM", config)
    check_logits(pool.run(plugin_logits, PARALLEL[parallelism], *family), parallelism)


def test_family_of_the_porting_guide_gives_the_logits_of_one_process(
    pool: ProcessPool, tmp_path: Path
) -> None:
    folder = tmp_path / "acme_olmo2"
    folder.mkdir()
    for name, source in zip(("describe", "model"), EXAMPLES[-2:], strict=True):
        (folder / f"{name}.py").write_text(source)
    family = (str(tmp_path), "acme_olmo2.model:Olmo2ForCausalLM", config_of("Olmo2"))
    check_logits(pool.run(plugin_logits, PARALLEL["tp2"], *family), "tp2")


@pytest.mark.parametrize(
    "parallelism",
    [
        "ep2",
        "tp2+ep2",
        pytest.param("tp4+ep2", marks=pytest.mark.release),
        pytest.param("dp2xtp2+ep4", marks=pytest.mark.release),
    ],
)
def test_third_party_experts_give_the_logits_of_one_process(
    parallelism: str, pool: ProcessPool, acme_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(acme_moe))
    catalog = Catalog.discover(Selection())
    (entry,) = (each for each in catalog.entries("models") if each.name == ACME_MOE)
    assert entry.distribution == "acme-family"
    family = (str(acme_moe), catalog.load(entry, ModelSpec).load, config_of("Qwen3Moe"))
    check_logits(pool.run(plugin_logits, PARALLEL[parallelism], *family), parallelism)


def test_third_party_experts_name_no_collective(acme_moe: Path) -> None:
    words = re.compile("comm|shard|collective|reduce|gather|group|rank|parallel", re.IGNORECASE)
    assert not words.findall((acme_moe / "acme_family_model.py").read_text())


def draft_model(drafter: str) -> tuple[str, dict[str, Any], str, dict[str, Any]]:
    """Return a target and a draft model, each with its class and its configuration."""
    if drafter == "mtp":
        config = config_of("DeepseekV3", num_nextn_predict_layers=1)
        module = "tokenspeed_models_deepseek.model"
        return f"{module}:DeepseekV3ForCausalLM", config, f"{module}:DeepseekMTP", config
    load = specs()["Qwen3ForCausalLM"].load
    if drafter == "dflash":
        config = config_of("Qwen3", **TARGET)
        read = read_dflash(
            PUBLISHED,
            num_target_layers=4,
            target_vocab_size=8,
            max_model_len=config["max_position_embeddings"],
        )
        return load, config, "tokenspeed_models.drafters.dflash:DFlashDrafter", {"dflash": read}
    config = config_of("Qwen3")
    head = {
        **config_of("Llama", num_hidden_layers=1, tie_word_embeddings=False),
        "architectures": [ARCHITECTURES[0]],
        "draft_vocab_size": 60,
    }
    c = read_eagle3(head, num_target_layers=3, max_model_len=64, layers=(0, 1))
    return load, config, "tokenspeed_models.drafters.eagle3:Eagle3Head", {"eagle3": c}


@pytest.mark.parametrize("drafter", ["mtp", "eagle3", "dflash"])
def test_passes_of_draft_models_run_the_planned_collectives(
    drafter: str, pool: ProcessPool
) -> None:
    for planned, run in pool.run(draft_collectives, PARALLEL["tp2"], *draft_model(drafter)):
        assert planned == run
        assert run[-1] == "all_gather"


@pytest.mark.parametrize("form", ["stacked", "dummy"])
def test_other_forms_of_experts_are_divided(form: str, pool: ProcessPool) -> None:
    load, config = specs()["Qwen3MoeForCausalLM"].load, config_of("Qwen3Moe")
    for sharded, whole in pool.run(both_logits, PARALLEL["tp4+ep2"], load, config, form):
        torch.testing.assert_close(sharded, whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))


def test_documentation_lists_the_tested_combinations() -> None:
    assert documented("logits") == TABLE
