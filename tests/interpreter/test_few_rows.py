"""Linear layers for few tokens under Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from tokenspeed_testing.conformance import poisoned_memory
from torch.nn import functional

from tokenspeed_kernels.triton.linear.few_rows import Tiling, few_rows_tiling, multiply

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize(
    ("num_rows", "in_size", "out_size", "tiling"),
    [
        (5, 256, 48, Tiling(16, 4, 2)),
        (8, 2048, 16, few_rows_tiling(2048)),
        (9, 320, 40, Tiling(16, 2, 2)),  # neither features nor rows of the weight fill whole tiles
        (16, 96, 33, Tiling(32, 1, 4)),
        (2, 72, 20, few_rows_tiling(72)),
    ],
)
@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
def test_few_rows_are_multiplied(
    num_rows: int, in_size: int, out_size: int, tiling: Tiling, activation: str | None
) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    num_weight_rows = out_size if activation is None else 2 * out_size
    # A slice of a longer row, like the heads of a step.
    x = torch.randn(num_rows, in_size + 8, generator=generator).half()[:, :in_size]
    weight = (torch.randn(num_weight_rows, in_size, generator=generator) / in_size**0.5).half()
    bias = torch.randn(num_weight_rows, generator=generator).half() if num_rows % 2 else None
    expected = functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    if activation is not None:
        gate, up = expected.chunk(2, dim=-1)
        act = (
            functional.silu(gate)
            if activation == "silu"
            else functional.gelu(gate, approximate="tanh")
        )
        expected = act * up
    with poisoned_memory():
        y = x.new_empty((num_rows, out_size))
        multiply(
            x, weight, bias, y, tiling, gated=activation is not None, is_gelu=activation == "gelu"
        )
    assert float((y.double() - expected).norm() / expected.norm()) < 1e-3
