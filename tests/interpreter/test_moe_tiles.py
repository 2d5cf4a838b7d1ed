"""Tiles of experts in two sizes, and operands loaded through tensor descriptors, under Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tokenspeed_testing.conformance import check
from torch.nn import functional

from tokenspeed_kernels import descriptors
from tokenspeed_kernels.triton.moe import experts
from tokenspeed_kernels.triton.moe.tilings import Gemm, Tiling
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


# Pairs of each expert, around halves and tiles of 32 pairs.
COUNTS = (1, 15, 16, 17, 31, 32, 33)
ORDERS: dict[str, dict[str, bool]] = {
    "plain": {},
    "weights first": {"weights_first": True},
    "joined": {"joined": True},
    "tma": {"joined": True, "tma": True},
}


@pytest.mark.parametrize("order", list(ORDERS))
def test_halves_of_tiles_match_the_formula(order: str) -> None:
    num_experts, size, inner = len(COUNTS), 72, 40
    up = Gemm(32, 32, 4, 2, together=2, **ORDERS[order])
    tiling = Tiling(32, up, replace(up, joined=False), halves=True)
    ids = torch.arange(num_experts).repeat_interleave(torch.tensor(COUNTS))
    ids = torch.cat((ids, torch.full((5,), num_experts)))  # without an expert
    ids = ids[torch.randperm(len(ids))][:, None].to(torch.int32)
    x = torch.randn(len(ids), size, dtype=torch.float16)
    gate_up = torch.randn(num_experts, 2 * inner, size, dtype=torch.float16) * 0.1
    down = torch.randn(num_experts, size, inner, dtype=torch.float16) * 0.1
    weights = torch.rand(len(ids), 1)
    tiles = experts.new_tiles(ids, num_experts, tiling.block_m)
    pairs, _ = experts.sort_by_expert(ids, num_experts, tiles, tiling.block_m)
    hidden = experts.run_gate_up(tiling, x, gate_up, pairs, tiles, 1)
    scaled = experts.run_down(tiling, hidden, down, pairs, tiles, weights)
    found = experts.add_up(scaled, ids, num_experts)

    expected = torch.zeros_like(found)
    for token, expert in enumerate(ids[:, 0].tolist()):
        if expert < num_experts:
            gate, up_values = (gate_up[expert].float() @ x[token].float()).chunk(2)
            activated = (functional.silu(gate) * up_values).half().float()
            expected[token] = weights[token] * (down[expert].float() @ activated)
    torch.testing.assert_close(found, expected, rtol=5e-3, atol=5e-3)
