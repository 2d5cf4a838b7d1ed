"""Pairs without an expert, as other processes' experts leave them, are not computed, under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels import inputs
from tokenspeed_kernels.reference import moe, moe_w8a8
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


def some_pairs(given: Mapping[str, Tensor], num_experts: int) -> dict[str, Tensor]:
    """Return inputs in which the first expert has no tokens, and half of the pairs have no expert."""
    ids = given["ids"].clone()
    ids[(ids == 0) | (torch.arange(ids.numel()).view(ids.shape) % 2 == 1)] = num_experts
    assert 0 < (ids < num_experts).sum() < ids.numel()
    return {**given, "ids": ids}


@pytest.mark.parametrize(
    ("problem", "num_tokens", "op", "kernel", "reference"),
    [
        (FEW, 4, inputs.moe_experts, experts.moe_experts, moe.moe_experts),
        (MANY, 9, inputs.moe_experts, experts.moe_experts, moe.moe_experts),
        (MANY, 6, inputs.moe_experts_fp8, experts_w8a8.moe_experts_fp8, moe_w8a8.moe_experts_fp8),
    ],
    ids=["few", "many", "fp8"],
)
def test_only_pairs_with_an_expert_are_computed(
    monkeypatch: pytest.MonkeyPatch,
    problem: Problem,
    num_tokens: int,
    op: Callable[..., dict[str, Any]],
    kernel: Callable[[Problem], Callable[..., Tensor]],
    reference: Callable[[Problem], Callable[..., Tensor]],
) -> None:
    generator = torch.Generator().manual_seed(5)
    given = op(problem, num_tokens, CPU, generator, strided=False)
    given = some_pairs(given, problem["num_experts"])
    expected = reference(problem)(*given.values())
    run = kernel(problem)
    idle = torch.ones(problem["num_experts"] + 1, dtype=torch.bool)
    idle[given["ids"].long()] = False
    for name in ("gate_up", "down"):
        # Reading these weights spoils the result. The E4M3 code of NaN is 0x7F.
        is_fp8 = given[name].element_size() == 1
        weight = given[name].view(torch.uint8) if is_fp8 else given[name]
        weight[idle[:-1]] = 0x7F if is_fp8 else float("nan")
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
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-2)
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
