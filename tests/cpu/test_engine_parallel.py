"""Engines of several processes generate the tokens of one process, for each family and layout."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from parallel_table import documented
from plugin_files import ACME_MOE
from tiny_families import EIGHT_EXPERTS, EXPERTS, FAMILIES, save_reference

from tokenspeed_core import LLM, SamplingParams

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",  # in fewer bits, sums in another order may choose another token
    "kv_cache_memory": "4MB",
    "max_num_seqs": 8,
    "chunked_prefill_size": 32,
    "skip_tokenizer_init": True,
    "max_model_len": 120,
}
LAYOUTS: dict[str, dict[str, int]] = {
    "tp2": {"tensor_parallel_size": 2},
    "tp4": {"tensor_parallel_size": 4},
    "ep2": {"expert_parallel_size": 2},
    "tp4+ep2": {"tensor_parallel_size": 4, "expert_parallel_size": 2},
}
TABLE = [
    (family, layout)
    for family in FAMILIES
    for layout in LAYOUTS
    if family in EXPERTS or "ep" not in layout
]
BY_DEFAULT = (("Qwen3Moe", "tp2"), ("GptOss", "ep2"))
# Layouts in which each process has some of the layers as a whole.
PARTLY_DIVIDED: dict[str, dict[str, int]] = {
    "whole attention": {"tensor_parallel_size": 2, "attn_tp_size": 1},
    "whole MLPs": {"tensor_parallel_size": 2, "dense_tp_size": 1},
    "whole experts": {"tensor_parallel_size": 2, "moe_tp_size": 1},
    "only experts": {"moe_tp_size": 2},
    "only experts, along both axes": {"moe_tp_size": 2, "expert_parallel_size": 2},
    "only attention": {"attn_tp_size": 4},
}
# Layouts in which each pair of processes has a copy of the MLPs.
MLP_COPIES: dict[str, dict[str, int]] = {
    "attention of four": {"tensor_parallel_size": 4, "dense_tp_size": 2},
    "fused all-reduces": {
        "tensor_parallel_size": 4,
        "dense_tp_size": 2,
        "enable_allreduce_fusion": True,
        "comm_fusion_max_num_tokens": 16,
    },
    "experts of four": {"tensor_parallel_size": 4, "dense_tp_size": 2, "expert_parallel_size": 4},
    "whole attention": {"tensor_parallel_size": 4, "attn_tp_size": 1, "dense_tp_size": 2},
}
WITH_MLP_COPIES = [
    ("Qwen3", "attention of four"),
    ("Qwen3", "fused all-reduces"),
    *(("DeepseekV3", layout) for layout in MLP_COPIES),
]
Generated = list[list[int]]


def prompt(length: int) -> list[int]:
    return [3 + 7 * index % 90 for index in range(length)]


def generate(model: Path, **layout: int) -> Generated:
    """Return greedy tokens of prompts in several chunks, and of prompts that begin as those did."""
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    prompts = [prompt(5), prompt(40), prompt(70)]
    with LLM(str(model), **SETTINGS, **layout) as llm:
        assert bool(llm.kernel_plan.collectives) == bool(layout)
        llm._engine._depth = 2  # as on a device
        outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params)
        again = [[*prompts[2][:64], 9], [*prompts[1], *outputs[1].outputs[0].token_ids[:12]]]
        hits = llm.generate([{"prompt_token_ids": each} for each in again], params)
        assert all(each.num_cached_tokens >= 32 for each in hits)
        return [list(each.outputs[0].token_ids) for each in (*outputs, *hits)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Generated]]:
    """Return a function that returns the checkpoint of a family, and what one process generates."""

    @cache
    def run(family: str) -> tuple[Path, Generated]:
        folder: Path = tmp_path_factory.mktemp(family)
        save_reference(family, folder, **EIGHT_EXPERTS.get(family, {}))
        return folder, generate(folder)

    return run


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(*case, marks=() if case in BY_DEFAULT else pytest.mark.release)
        for case in TABLE
    ],
)
def test_several_processes_generate_the_tokens_of_one(
    family: str, layout: str, alone: Callable[[str], tuple[Path, Generated]]
) -> None:
    model, expected = alone(family)
    assert generate(model, **LAYOUTS[layout]) == expected


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        # By default, each of two processes has a copy of all experts.
        pytest.param(
            family,
            layout,
            marks=() if (family, layout) == ("Qwen3Moe", "whole experts") else pytest.mark.release,
        )
        for family in ("Qwen3Moe", "DeepseekV3")
        for layout in PARTLY_DIVIDED
    ],
)
def test_partly_divided_models_generate_the_tokens_of_one_process(
    family: str, layout: str, alone: Callable[[str], tuple[Path, Generated]]
) -> None:
    model, expected = alone(family)
    assert generate(model, **PARTLY_DIVIDED[layout]) == expected


@pytest.mark.release  # the logits are compared by default
@pytest.mark.parametrize(("family", "layout"), WITH_MLP_COPIES)
def test_copies_of_mlps_generate_the_tokens_of_one_process(
    family: str, layout: str, alone: Callable[[str], tuple[Path, Generated]]
) -> None:
    model, expected = alone(family)
    assert generate(model, **MLP_COPIES[layout]) == expected


@pytest.mark.release  # the logits are compared by default
@pytest.mark.parametrize(
    "layout",
    [{"tensor_parallel_size": 2, "expert_parallel_size": 2}, LAYOUTS["ep2"], LAYOUTS["tp4+ep2"]],
    ids=str,
)
def test_third_party_experts_generate_the_tokens_of_one_process(
    layout: dict[str, int],
    alone: Callable[[str], tuple[Path, Generated]],
    acme_moe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, expected = alone("Qwen3Moe")
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [ACME_MOE]}))
    (tmp_path / "model.safetensors").symlink_to(model / "model.safetensors")
    monkeypatch.syspath_prepend(str(acme_moe))
    monkeypatch.setenv("PYTHONPATH", str(acme_moe), prepend=os.pathsep)  # of the other ranks
    assert generate(tmp_path, **layout) == expected


def test_documentation_lists_the_tested_engines() -> None:
    assert [case for case in documented("tokens") if case[1] in LAYOUTS] == TABLE
