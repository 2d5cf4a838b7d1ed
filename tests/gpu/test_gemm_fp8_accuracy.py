"""The error of fast accumulation in FP8 GEMMs, compared with float64 and with the quantization error.

Tensor cores sum in an accumulator that is shorter than float32. torch._scaled_mm adds its sums to float32 regularly
or, with fast accumulation, only at the end. `pytest -s` prints the errors.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tokenspeed_kernels.reference.fp8 import quantize_rows
from tokenspeed_kernels.triton.linear.gemm_fp8 import MAX_ROWS, linear_fp8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs a device with e4m3",
    ),
]
NUM_ROWS = 512
SIZES = [(4096, 6144), (4096, 24576), (12288, 4096)]  # (in_size, out_size) of qwen3-8b


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def operands(in_size: int, out_size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(NUM_ROWS, in_size, device="cuda", generator=generator)
    return x, torch.randn(out_size, in_size, device="cuda", generator=generator) / in_size**0.5


def errors(x: Tensor, weight: Tensor) -> dict[str, float]:
    """Return the relative errors of both accumulations, and of quantization, against float64."""
    (codes, scale), (held, held_scale) = quantize_rows(x), quantize_rows(weight)
    exact = (codes.double() @ held.double().t()) * scale.double() * held_scale.double().t()
    products = {
        name: torch._scaled_mm(
            codes,
            held.t(),
            scale_a=scale,
            scale_b=held_scale.t(),
            out_dtype=torch.bfloat16,
            use_fast_accum=is_quick,
        )
        for name, is_quick in (("quick", True), ("full", False))
    }
    found = {name: relative(product, exact) for name, product in products.items()}
    found["quantizing"] = relative(exact, x.double() @ weight.double().t())
    print(
        f"{tuple(weight.shape)}:", ", ".join(f"{name} {error:.2e}" for name, error in found.items())
    )
    return found


@pytest.mark.parametrize(("in_size", "out_size"), SIZES)
def test_fast_accumulation_error_is_below_quantization_error(in_size: int, out_size: int) -> None:
    found = errors(*operands(in_size, out_size))
    assert found["full"] < 2.5e-3, "the rounding to bfloat16"
    assert found["quick"] < found["quantizing"] / 4


@pytest.mark.parametrize(("in_size", "out_size"), SIZES)
def test_fast_accumulation_error_of_growing_sums(in_size: int, out_size: int) -> None:
    x, weight = operands(in_size, out_size)
    found = errors(x.abs(), weight.abs())
    assert found["full"] < 2.5e-3
    assert found["quick"] < 2e-5 * in_size, (
        "truncation errors add up if no term is negative: 0.07 at 4,096 features"
    )


@pytest.mark.parametrize("num_rows", [MAX_ROWS, NUM_ROWS])
def test_op_is_equally_accurate_with_few_and_many_rows(num_rows: int) -> None:
    x, weight = operands(12288, 4096)
    (codes, scale), (held, held_scale) = quantize_rows(x[:num_rows]), quantize_rows(weight)
    exact = (codes.double() @ held.double().t()) * scale.double() * held_scale.double().t()
    product = linear_fp8({"in_size": 12288, "out_size": 4096, "dtype": "bfloat16"})
    error = relative(product(codes, scale, held, held_scale, None), exact)
    print(f"{num_rows} rows: {error:.2e}")
    assert error < 1e-2
