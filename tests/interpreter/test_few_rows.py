"""Linear layers for few tokens under Triton's interpreter, against float64."""

from __future__ import annotations

from copy import copy

import pytest
import torch
from tokenspeed_testing.conformance import make_inputs, poisoned_memory
from tokenspeed_testing.shapes import contract_of
from torch.nn import functional

from tokenspeed_kernels.descriptors import TRITON_LINEAR
from tokenspeed_kernels.reference import fused_linear
from tokenspeed_kernels.triton.fused.fused_block import few_rows_block
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


def test_fused_block_has_a_kernel_for_each_layer() -> None:
    sizes = {"in_size": 96, "hidden_size": 128, "intermediate_size": 160, "out_size": 192}
    problem = {**sizes, "max_rows": 64, "dtype": "float16"}
    (spec,) = (spec for spec in TRITON_LINEAR if spec.op == "fused_block")
    given = make_inputs(contract_of(spec), problem, 5, torch.device("cpu"), strided=True)
    expected = fused_linear.fused_block(problem)(*(copy(value) for value in given.values()))
    found = few_rows_block(problem)(*given.values())
    for got, want in zip(found, expected, strict=True):
        assert float((got.double() - want.double()).norm() / want.double().norm()) < 2e-3
