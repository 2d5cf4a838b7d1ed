"""The FP8 KV cache: values, memory, scales and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from tokenspeed_testing.plans import PlanMaker
from torch import Tensor

from tokenspeed_core.api import AttentionStep, FullAttention
from tokenspeed_core.checkpoint.kv_scales import read_kv_scales
from tokenspeed_core.config import Config
from tokenspeed_core.engine.factory import discover, resolve
from tokenspeed_core.errors import ConfigError
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.resolved import Resolved
from tokenspeed_core.worker.attention import AttentionGroup, AttentionLayer, make_write_kv
from tokenspeed_core.worker.local import LocalRunner, plan_only
from tokenspeed_kernels.reference.cache import write_kv


def test_large_values_saturate_in_the_cache() -> None:
    problem = {
        "num_kv_heads": 1,
        "head_size": 4,
        "block_size": 2,
        "dtype": "bfloat16",
        "kv_dtype": "float8_e4m3fn",
    }
    caches = torch.zeros(2, 3, 2, 1, 4, dtype=torch.float8_e4m3fn)
    k = torch.tensor([[[1.0, -1000.0, 0.3, 1e30]]], dtype=torch.bfloat16)
    write_kv(problem)(k, -k, *caches, torch.tensor([3]))
    assert caches[0].float()[1, 1, 0].tolist() == [1.0, -448.0, 0.3125, 448.0]
    assert caches[1].float()[1, 1, 0].tolist() == [-1.0, 448.0, -0.3125, -448.0]
    assert caches.float().count_nonzero() == 8


def test_page_bytes_follow_the_cache_dtype(tiny: Callable[..., Resolved], catalog: Catalog) -> None:
    (plain, plain_memory, _), (fp8, fp8_memory, _) = (
        plan_only(tiny(dtype="bfloat16", block_size=16, kv_cache_dtype=kind), catalog)
        for kind in ("auto", "fp8_e4m3")
    )
    assert plain_memory["page_bytes"] == 2 * fp8_memory["page_bytes"]
    assert [dict(planned.problem)["kv_dtype"] for planned in fp8.find("write_kv")] == [
        "float8_e4m3fn"
    ]
    assert [dict(planned.problem)["kv_dtype"] for planned in plain.find("write_kv")] == ["bfloat16"]


class RecordingKernel:
    """An attention kernel that records its queries and returns the values."""

    def prepare(self, step: object) -> None:
        pass

    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        self.queries = q.clone()
        out.copy_(v_cache)


def test_layer_scales_apply_to_keys_and_values() -> None:
    kernel, written = RecordingKernel(), []
    group = AttentionGroup(FullAttention("full", 1, 1, 4))
    group.batches = [("prefill", Mock(AttentionStep), None)]
    layer = AttentionLayer(group, 0, 0, 1, 1, 4, 0.5, None, None, kv_scale=4.0)
    layer.bind("prefill", kernel)
    layer.write_kv = make_write_kv(
        None, lambda k, v, *cache: written.extend((k, v)), layer.kv_scale
    )
    layer.caches = (torch.full((2, 1, 4), 3.0),) * 2
    q, k, v = torch.randn(3, 2, 1, 4)
    given = q.clone(), k.clone(), v.clone()
    out = layer(q, k, v)
    assert torch.equal(kernel.queries, 4 * given[0])
    assert torch.equal(written[0], k / 4)
    assert torch.equal(written[1], v / 4)
    assert torch.equal(out, torch.full((2, 1, 4), 12.0))
    assert torch.equal(k, given[1])
    assert torch.equal(v, given[2])


def scales_file(folder: Path, factors: object) -> str:
    path = folder / "scales.json"
    path.write_text(
        json.dumps(
            {"model_type": "x", "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": factors}}
        )
    )
    return str(path)


@pytest.mark.parametrize("is_scaled", [False, True])
def test_fp8_cache_hardly_changes_tokens(
    make_runner: Callable[..., LocalRunner], tmp_path: Path, is_scaled: bool
) -> None:
    scales = scales_file(tmp_path, {"0": {"0": 0.02, "1": 0.01}}) if is_scaled else None
    prompts = [[(7 * seed + 11 * i) % 90 + 3 for i in range(20 + seed)] for seed in range(8)]
    found = []
    for settings in ({}, {"kv_cache_dtype": "fp8_e4m3", "quantization_param_path": scales}):
        runner, plans = make_runner(**settings), PlanMaker(4)
        for slot, prompt in enumerate(prompts):
            plans.add(str(slot), prompt, slot)
        plans.step(runner, chunks={str(slot): len(prompt) for slot, prompt in enumerate(prompts)})
        found.append([plans.sequences[str(slot)].output for slot in range(len(prompts))])
    same = sum(a == b for a, b in zip(*found, strict=True))
    assert same >= 6, f"{same} of 8 first tokens are the same"


def test_scales_are_read_per_layer(tmp_path: Path) -> None:
    assert read_kv_scales(scales_file(tmp_path, {"0": {"1": 0.5, "0": 0.25}}), 2) == (0.25, 0.5)


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ({"0": {"0": 1.0}}, "KeyError"),
        ([1.0, 1.0], "TypeError"),
        ({"0": {"0": 1.0, "1": "much"}}, "could not convert string to float"),
        ({"0": {"0": 1.0, "1": 0.0}}, "positive and finite"),
    ],
)
def test_scale_file_must_cover_every_layer(tmp_path: Path, factors: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"scales.json.*{message}"):
        read_kv_scales(scales_file(tmp_path, factors), 2)


def test_missing_scale_file_is_refused() -> None:
    config = Config.from_keywords(
        kv_cache_dtype="fp8_e4m3", quantization_param_path="/nowhere.json"
    )
    with pytest.raises(ConfigError, match="/nowhere"):
        resolve(config, discover(config))


def test_scales_need_an_fp8_cache() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8_e4m3"):
        Config.from_keywords(quantization_param_path="scales.json")
    with pytest.raises(ConfigError, match="auto, fp8_e4m3"):
        Config.from_keywords(kv_cache_dtype="fp4")
    assert Config.from_keywords(kv_cache_dtype="fp8").kv_cache_dtype == "fp8_e4m3"
