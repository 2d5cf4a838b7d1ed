"""The fused rotary embedding and KV cache write: reference and selection."""

from __future__ import annotations

import pytest
import torch
from tokenspeed_testing.conformance import make_inputs

from tokenspeed_core.api import PlatformInfo
from tokenspeed_core.kernels.installed import installed_kernels, installed_ops
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_kernels.contracts import ROPE_CACHE
from tokenspeed_kernels.reference import cache, rope, rope_cache

PROBLEM = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_size": 16,
    "value_head_size": None,
    "rotary_size": 8,
    "block_size": 4,
    "dtype": "float32",
    "kv_dtype": "float32",
}


def test_reference_rotates_then_writes_and_keeps_k() -> None:
    given = make_inputs(ROPE_CACHE[0], PROBLEM, 7, torch.device("cpu"), strided=True)
    q, k, k_cache, v_cache = (given[name].clone() for name in ("q", "k", "k_cache", "v_cache"))
    rope.rope(PROBLEM)(q, k, given["positions"], given["cos_sin"], given["interleaved"])
    cache.write_kv(PROBLEM)(k, given["v"], k_cache, v_cache, given["slots"])
    before = given["k"].clone()
    rope_cache.rope_write_kv(PROBLEM)(*given.values())
    assert torch.equal(given["k"], before)
    for name, expected in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        assert torch.equal(given[name], expected), name


@pytest.mark.parametrize("rotation", ["rope", "qk_norm_rope"])
def test_gpu_uses_one_kernel_and_cpu_the_parts(rotation: str) -> None:
    catalog = Catalog.discover()
    kernels, ops = installed_kernels(catalog), installed_ops(catalog)

    def taken(platform: PlatformInfo) -> list[tuple[str, str]]:
        choices = Selector(kernels, platform, ops=ops).select_all((rotation, "write_kv"), PROBLEM)
        return [(choice.spec.op, choice.spec.backend) for choice in choices]

    assert taken(PlatformInfo("cuda", (9, 0))) == [(f"{rotation}_write_kv", "triton")]
    assert taken(PlatformInfo("cpu")) == [(rotation, "torch"), ("write_kv", "torch")]
