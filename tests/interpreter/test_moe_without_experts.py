"""Pairs without an expert, as other processes' experts leave them, are not computed, under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tokenspeed_testing.conformance import make_inputs, reference
from tokenspeed_testing.shapes import contract_of
from torch import Tensor

from tokenspeed_core.api import OpContract, Problem
from tokenspeed_kernels import descriptors
from tokenspeed_kernels.reference import fp8, fp8_block
from tokenspeed_kernels.triton.moe import experts, experts_w8a8

pytestmark = [
    pytest.mark.interpreter,
    # The interpreter's NumPy warns about values that are masked later.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
CPU = torch.device("cpu")
SIZES = {"hidden_size": 24, "intermediate_size": 20, "dtype": "float32"}
FEW: Problem = {"num_experts": 48, "top_k": 3, **SIZES}
MANY: Problem = {"num_experts": 4, "top_k": 3, **SIZES}  # E is a power of two
GROUPED: Problem = {
    **MANY,
    "hidden_size": 96,
    "intermediate_size": 64,
    "group_size": 32,
    "alpha": 1.7,
    "limit": 7.0,
    "dtype": "float16",
}
FEW_GROUPED: Problem = {**GROUPED, "num_experts": 48}
SPECS = {spec.op: spec for spec in descriptors.TRITON_MOE}


def some_pairs(given: Mapping[str, Tensor], num_experts: int) -> dict[str, Tensor]:
    """Return inputs in which the first expert has no tokens, and half of the pairs have no expert."""
    ids = given["ids"].clone()
    ids[(ids == 0) | (torch.arange(ids.numel()).view(ids.shape) % 2 == 1)] = num_experts
    assert 0 < (ids < num_experts).sum() < ids.numel()
    return {**given, "ids": ids}


def poison(given: Mapping[str, Any], contract: OpContract, problem: Problem) -> None:
    """Make reading the weights, scales or biases of idle experts spoil the result."""
    idle = torch.ones(problem["num_experts"] + 1, dtype=torch.bool)
    idle[given["ids"].long()] = False
    num_spoiled = 0
    for name, value in given.items():
        if name in contract.rows or value is None or value.ndim == 1:  # a scale of all experts
            continue
        assert len(value) == problem["num_experts"]
        if value.dtype == torch.float8_e4m3fn:
            value.view(torch.uint8)[idle[:-1]] = 0x7F  # NaN
        elif value.is_floating_point():
            value[idle[:-1]] = float("nan")
        elif name.endswith("_scale"):
            value[idle[:-1]] = 0xFF  # infinity
        num_spoiled += value.is_floating_point() or name.endswith("_scale")
    assert num_spoiled >= 2


@pytest.mark.parametrize(
    ("op", "problem", "num_tokens"),
    [
        ("moe_experts", FEW, 4),
        ("moe_experts", MANY, 9),
        *(
            (f"moe_experts_{each}", MANY, 6)
            for each in ("fp8", "fp8_static", "int8", "int8_static")
        ),
        ("moe_experts_fp8_block", MANY | {"intermediate_size": 128, "dtype": "float16"}, 6),
        ("moe_experts_w4a16", GROUPED, 6),
        ("moe_experts_mxfp4", GROUPED, 6),
        ("moe_biased_experts", GROUPED, 6),
        ("moe_biased_experts_mxfp4", GROUPED, 6),
        ("moe_experts_w4a16", FEW_GROUPED, 4),
        ("moe_experts_mxfp4", FEW_GROUPED, 4),
        ("moe_biased_experts_mxfp4", FEW_GROUPED, 4),
    ],
)
def test_only_pairs_with_an_expert_are_computed(
    monkeypatch: pytest.MonkeyPatch, op: str, problem: Problem, num_tokens: int
) -> None:
    contract = contract_of(SPECS[op])
    given = make_inputs(contract, problem, num_tokens, CPU, strided=False)
    given = some_pairs(given, problem["num_experts"])
    (expected,) = reference(contract, problem, given)
    # The interpreter rounds to e4m3 wrongly.
    monkeypatch.setattr(experts_w8a8, "quantize_fp8", fp8.quantize_fp8)
    monkeypatch.setattr(experts_w8a8, "quantize_fp8_static", fp8.quantize_fp8_static)
    monkeypatch.setattr(experts_w8a8, "quantize_fp8_groups", fp8_block.quantize_fp8_groups)
    run = SPECS[op].factory()(problem)
    poison(given, contract, problem)
    buffers: list[Tensor] = []
    make = torch.empty

    def empty(*shape: Any, **options: Any) -> Tensor:
        made = make(*shape, **options)
        if made.is_floating_point() and made.element_size() > 1:
            buffers.append(made.fill_(float("nan")))
        return made

    monkeypatch.setattr(torch, "empty", empty)
    found = run(*given.values())
    monkeypatch.undo()
    torch.testing.assert_close(found.float(), expected, rtol=5e-3, atol=2e-2)
    num_pairs = int((given["ids"] < problem["num_experts"]).sum())
    shapes = {(given["ids"].numel(), problem["intermediate_size"]): "hidden"}
    shapes[given["ids"].numel(), problem["hidden_size"]] = "scaled"
    of_pairs = {
        shapes[buffer.shape]: int(buffer.isnan().logical_not().any(dim=1).sum())
        for buffer in buffers
        if buffer.shape in shapes
    }
    assert set(of_pairs.values()) == {num_pairs}


@pytest.mark.parametrize(("num_pairs", "num_experts"), [(40, 4), (40, 5), (5000, 8)])
def test_pairs_without_an_expert_are_not_counted(num_pairs: int, num_experts: int) -> None:
    generator = torch.Generator().manual_seed(num_pairs)
    ids = torch.randint(0, num_experts + 1, (num_pairs // 4, 4), generator=generator)
    pairs, counts = experts.sort_by_expert(ids.to(torch.int32), num_experts)
    expected = torch.bincount(ids.flatten(), minlength=num_experts + 1)[:num_experts]
    assert torch.equal(counts.long(), expected)
    used = pairs[: int(expected.sum())].long()
    assert torch.equal(
        ids.flatten()[used], torch.repeat_interleave(torch.arange(num_experts), expected)
    )
    assert used.unique().numel() == len(used)


@pytest.mark.parametrize(
    ("num_pairs", "num_experts", "block_m"), [(40, 5, 16), (400, 3, 16), (5000, 8, 64)]
)
def test_tiles_cover_the_run_of_each_expert(num_pairs: int, num_experts: int, block_m: int) -> None:
    generator = torch.Generator().manual_seed(num_pairs)
    ids = torch.randint(0, num_experts + 1, (num_pairs // 4, 4), generator=generator)
    ids[ids == 1] = 0  # an expert without pairs
    tiles = experts.new_tiles(ids, num_experts, block_m).fill_(-1)
    _, counts = experts.sort_by_expert(ids.to(torch.int32), num_experts, tiles, block_m)
    expected, end = [], 0
    for expert, count in enumerate(counts.tolist()):
        begin, end = end, end + count
        expected += [[expert, first, end] for first in range(begin, end, block_m)]
    assert tiles[: len(expected)].tolist() == expected
    assert set(tiles[len(expected) :, 0].tolist()) <= {num_experts}
