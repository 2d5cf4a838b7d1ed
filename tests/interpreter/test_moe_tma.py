"""Experts of many tokens, with operands loaded through tensor descriptors, under Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tokenspeed_testing.conformance import check

from tokenspeed_kernels import descriptors
from tokenspeed_kernels.triton.moe import experts
from tokenspeed_kernels.triton.moe.tilings import Gemm, Tiling, without_tma
from tokenspeed_kernels.triton.moe.tuned import tuned_tilings

pytestmark = pytest.mark.interpreter
(SPEC,) = (spec for spec in descriptors.TRITON_MOE if spec.op == "moe_experts")
CPU = torch.device("cpu")


def test_experts_of_many_tokens_conform() -> None:
    *_, (most, _), (_, tiling) = tuned_tilings("moe_experts", Tiling.of)
    assert tiling.up.tma and tiling.down.tma
    case = {
        "num_experts": 2,
        "top_k": 1,
        "hidden_size": 72,
        "intermediate_size": 40,
        "dtype": "float16",
    }
    assert check(SPEC, CPU, cases=[case], num_rows=(2 * int(most) + 2,)) == 2


def test_tma_gives_the_same_results_as_loads_of_threads() -> None:
    """Tiles are full, at most half full, and shorter than the rows; some pairs have no expert."""
    num_tokens, num_experts, top_k, size, inner = 70, 3, 2, 72, 40
    gemm = Gemm(32, 32, 4, 2, tma=True)
    tiling = Tiling(32, replace(gemm, joined=True, together=2), gemm)
    ((_, plain),) = without_tma(((1.0, tiling),))
    x = torch.randn(num_tokens, size, dtype=torch.float16)
    gate_up = torch.randn(num_experts, 2 * inner, size, dtype=torch.float16) * 0.1
    down = torch.randn(num_experts, size, inner, dtype=torch.float16) * 0.1
    ids = torch.rand(num_tokens, num_experts).topk(top_k).indices.to(torch.int32)
    ids[:5] = num_experts
    weights = torch.rand(num_tokens, top_k)
    found = []
    for each in (tiling, plain):
        tiles = experts.new_tiles(ids, num_experts, each.block_m)
        pairs, _ = experts.sort_by_expert(ids, num_experts, tiles, each.block_m)
        hidden = experts.run_gate_up(each, x, gate_up, pairs, tiles, top_k)
        scaled = experts.run_down(each, hidden, down, pairs, tiles, weights)
        found.append(experts.add_up(scaled, ids, num_experts))
    assert found[0].any()
    torch.testing.assert_close(found[0], found[1])
