"""Router logits of many tokens, with the features split over programs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tokenspeed_kernels.triton.moe.logits import (
    MAX_PROGRAMS,
    MAX_SMALL_TOKENS,
    PRECOMPILED,
    ManyLogits,
)


@pytest.fixture(autouse=True)
def _bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply bfloat16 tiles, which the interpreter keeps as the integers of their bits."""
    multiply = InterpreterBuilder.create_dot

    def widened(tile: TensorHandle) -> TensorHandle:
        if tile.dtype.scalar != tl.bfloat16:
            return tile
        return TensorHandle((tile.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: TensorHandle, b: TensorHandle, *others: Any) -> TensorHandle:
        return multiply(self, widened(a), widened(b), *others)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize("num_tokens", [17, 70, MAX_SMALL_TOKENS + 1])
@pytest.mark.parametrize(("num_experts", "size"), [(40, 300), (8, 2200)])
def test_splits_add_up(num_experts: int, size: int, num_tokens: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(num_tokens, 2 * size, dtype=torch.bfloat16)[:, :size]
    weight = torch.randn(num_experts, size)
    logits = ManyLogits(num_experts, size)
    y = logits(x, weight)
    torch.testing.assert_close(y, x.float() @ weight.t(), atol=1e-4, rtol=1e-5)
    # The counters are zero again, and the order of the sums is always the same.
    assert torch.equal(logits(x, weight), y)


@pytest.mark.parametrize(
    ("num_experts", "size"), [(8, 64), (64, 2048), (32, 2880), (160, 5120), (256, 7168)]
)
def test_programs_are_limited_and_precompiled(num_experts: int, size: int) -> None:
    logits = ManyLogits(num_experts, size)
    parts = {count: logits.partition(count) for count in (*range(17, 600), *PRECOMPILED, 100_000)}
    for _, tiles, num_splits in parts.values():
        assert num_splits == 1 or tiles[0] * tiles[1] * num_splits <= MAX_PROGRAMS
    variants = {count: (tiling, num_splits) for count, (tiling, _, num_splits) in parts.items()}
    assert {*variants.values()} == {variants[count] for count in PRECOMPILED}
