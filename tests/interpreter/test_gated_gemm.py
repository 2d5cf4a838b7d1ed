"""The gated GEMM under Triton's interpreter, with partial tiles of rows, features and halves."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional

from tokenspeed_kernels.triton.linear.gated_gemm import gated_linear

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize(
    ("num_rows", "in_size", "out_size", "is_gelu"),
    [(5, 96, 40, False), (130, 64, 136, False), (129, 72, 8, True)],
)
def test_gated_gemm_with_partial_tiles(
    num_rows: int, in_size: int, out_size: int, is_gelu: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(num_rows, in_size).half()
    weight = (torch.randn(2 * out_size, in_size) / in_size**0.5).half()
    problem = {"in_size": in_size, "out_size": out_size, "dtype": "float16"}
    found = gated_linear(problem, is_gelu=is_gelu)(x, weight)
    gate, up = functional.linear(x.float(), weight.float()).chunk(2, dim=-1)
    activation = partial(functional.gelu, approximate="tanh") if is_gelu else functional.silu
    torch.testing.assert_close(found.float(), activation(gate) * up, atol=8e-3, rtol=4e-3)
