"""Linear layers for few tokens on a GPU at model sizes, against float64."""

from __future__ import annotations

import pytest
import torch
from tokenspeed_testing.conformance import poisoned_memory
from torch.nn import functional

from tokenspeed_kernels.triton.linear.few_rows import few_rows_tiling, multiply
from tokenspeed_kernels.triton.pdl import supports_pdl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("in_size", "out_size"), [(1024, 4096), (4096, 6144), (12288, 4096), (3072, 1000), (1000, 3000)]
)
def test_few_rows_are_as_accurate_as_float64(
    dtype: torch.dtype, gated: bool, in_size: int, out_size: int
) -> None:
    tiling = few_rows_tiling(in_size, gated=gated)
    for num_rows in (2, 5, 8, 9, 16):
        x = torch.randn(num_rows, in_size + 8, device="cuda", dtype=dtype)[:, :in_size]
        weight = torch.randn(2 * out_size if gated else out_size, in_size, device="cuda")
        weight = (weight / in_size**0.5).to(dtype)
        exact = x.double() @ weight.double().T
        if gated:
            exact = functional.silu(exact[:, :out_size]) * exact[:, out_size:]
        with poisoned_memory():
            y = x.new_empty((num_rows, out_size))
            multiply(x, weight, None, y, tiling, gated=gated, pdl=supports_pdl())
        assert float((y.double() - exact).norm() / exact.norm()) < 6e-3
