"""The gated GEMM on a GPU matches a GEMM followed by SwiGLU bitwise."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tokenspeed_kernels.triton.activation.gated import silu_mul
from tokenspeed_kernels.triton.linear.gated_gemm import gated_linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="needs Hopper or newer",
    ),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("num_rows", "in_size", "out_size"), [(1, 64, 128), (513, 96, 200), (2049, 1024, 3072)]
)
def test_gated_gemm_matches_gemm_and_silu_mul(
    num_rows: int, in_size: int, out_size: int, dtype: str
) -> None:
    problem = {"in_size": in_size, "out_size": out_size, "size": out_size, "dtype": dtype}
    x = torch.randn(num_rows, in_size, device="cuda", dtype=getattr(torch, dtype))
    weight = torch.randn(2 * out_size, in_size, device="cuda", dtype=x.dtype) / in_size**0.5
    expected = silu_mul(problem)(functional.linear(x, weight)).double()
    found = gated_linear(problem)(x, weight).double()
    assert float((found - expected).norm() / expected.norm()) < 5e-3
    assert found.isfinite().all()
