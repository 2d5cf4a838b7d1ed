"""FP8 GEMV kernels on a GPU at model sizes, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tokenspeed_kernels import inputs
from tokenspeed_kernels.reference.fp8 import quantize_rows
from tokenspeed_kernels.reference.norm import rms_norm
from tokenspeed_kernels.triton.linear.gemv_fp8 import add_rms_norm_mlp_fp8, quantize_linear_fp8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs a device with e4m3",
    ),
]
CUDA = torch.device("cuda")


def exactly(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    codes, x_scale = quantize_rows(x)
    return (codes.double() @ weight.double().t()) * x_scale.double() * scale.double().t()


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("in_size", "out_size"), [(1024, 4096), (2048, 1024), (4096, 4096), (12288, 4096)]
)
def test_gemv_quantizes_its_row(in_size: int, out_size: int) -> None:
    problem = {"in_size": in_size, "out_size": out_size, "dtype": "bfloat16"}
    given = inputs.quantize_linear_fp8(
        problem, 1, CUDA, torch.Generator().manual_seed(1), strided=False
    )
    found = quantize_linear_fp8(problem)(*given.values())
    assert error(found, exactly(given["x"], given["weight"], given["weight_scale"])) < 6e-3


@pytest.mark.parametrize(("hidden_size", "size"), [(1024, 3072), (4096, 12288)])
def test_mlp_fuses_norm_and_quantization(hidden_size: int, size: int) -> None:
    problem = {"hidden_size": hidden_size, "size": size, "dtype": "bfloat16"}
    given = inputs.add_rms_norm_mlp_fp8(
        problem, 1, CUDA, torch.Generator().manual_seed(2), strided=False
    )
    found, total = add_rms_norm_mlp_fp8(problem)(*given.values())
    assert torch.equal(total, given["x"] + given["residual"])
    normed = rms_norm(problem)(total, given["norm_weight"], given["eps"])
    gate, up = exactly(normed, given["gate_up"], given["gate_up_scale"]).bfloat16().chunk(2, dim=-1)
    inner = functional.silu(gate.float()).bfloat16() * up
    # Values halfway between two codes may round to either; too few to exceed this bound.
    assert error(found, exactly(inner, given["down"], given["down_scale"])) < 2e-2
