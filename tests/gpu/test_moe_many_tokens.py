"""Experts of many tokens on a device, with operands loaded by TMA."""

from __future__ import annotations

import pytest
import torch
from tokenspeed_testing.conformance import check

from tokenspeed_kernels import descriptors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
(SPEC,) = (spec for spec in descriptors.TRITON_MOE if spec.op == "moe_experts")


@pytest.mark.parametrize("num_rows", [24, 100, 193, 700])
@pytest.mark.parametrize(("size", "inner"), [(144, 80), (200, 328), (148, 84)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_experts_conform_around_every_tiling_limit(
    size: int, inner: int, num_rows: int, dtype: str
) -> None:
    """Rows of 148 values are not aligned for TMA, so that threads load them."""
    case = {
        "num_experts": 6,
        "top_k": 2,
        "hidden_size": size,
        "intermediate_size": inner,
        "dtype": dtype,
    }
    assert check(SPEC, torch.device("cuda"), cases=[case], num_rows=(num_rows,)) == 2
