"""FP8 GEMV kernels under Triton's interpreter, against the separate kernels."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_kernels import inputs
from tokenspeed_kernels.triton.linear import gemm_fp8, gemv_fp8
from tokenspeed_kernels.triton.quantize import fp8_per_token

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # 0 / 0 in NumPy
]
DTYPE, DEVICE = "float16", torch.device("cpu")
TOLERANCE = {"rtol": 2e-2, "atol": 2e-2}  # another order of sums, and one rounding


@pytest.mark.parametrize(("in_size", "out_size"), [(96, 48), (256, 512), (4096, 256)])
def test_gemv_quantizes_its_row(in_size: int, out_size: int) -> None:
    problem = {"in_size": in_size, "out_size": out_size, "size": in_size, "dtype": DTYPE}
    given = inputs.quantize_linear_fp8(
        problem, 1, DEVICE, torch.Generator().manual_seed(1), strided=False
    )
    x, *weights = given.values()
    expected = gemm_fp8.linear_fp8(problem)(*fp8_per_token.quantize_fp8(problem)(x), *weights)
    torch.testing.assert_close(
        gemv_fp8.quantize_linear_fp8(problem)(x, *weights), expected, **TOLERANCE
    )


@pytest.mark.parametrize(("in_size", "out_size"), [(96, 48), (256, 512), (4096, 256)])
def test_gemv_fuses_add_and_norm(in_size: int, out_size: int) -> None:
    problem = {"in_size": in_size, "out_size": out_size, "size": in_size, "dtype": DTYPE}
    given = inputs.add_rms_norm_linear_fp8(
        problem, 1, DEVICE, torch.Generator().manual_seed(2), strided=False
    )
    codes, scale, total = fp8_per_token.sum_rms_norm_fp8(problem)(*list(given.values())[:4])
    expected = gemm_fp8.linear_fp8(problem)(codes, scale, *list(given.values())[4:])
    found, found_total = gemv_fp8.add_rms_norm_linear_fp8(problem)(*given.values())
    assert torch.equal(found_total, total)
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize(("hidden_size", "size"), [(96, 48), (256, 512)])
def test_mlp_matches_separate_kernels(hidden_size: int, size: int) -> None:
    problem = {"hidden_size": hidden_size, "size": size, "dtype": DTYPE}
    given = inputs.add_rms_norm_mlp_fp8(
        problem, 1, DEVICE, torch.Generator().manual_seed(3), strided=False
    )
    *before, gate_up, gate_up_scale, gate_up_bias, down, down_scale, down_bias = given.values()
    wide = {"in_size": hidden_size, "out_size": 2 * size, "size": hidden_size, "dtype": DTYPE}
    narrow = {"in_size": size, "out_size": hidden_size, "size": size, "dtype": DTYPE}
    codes, scale, total = fp8_per_token.sum_rms_norm_fp8(wide)(*before)
    halves = gemm_fp8.linear_fp8(wide)(codes, scale, gate_up, gate_up_scale, gate_up_bias)
    expected = gemm_fp8.linear_fp8(narrow)(
        *fp8_per_token.silu_mul_fp8(narrow)(halves), down, down_scale, down_bias
    )
    found, found_total = gemv_fp8.add_rms_norm_mlp_fp8(problem)(*given.values())
    assert torch.equal(found_total, total)
    # Another order of sums may move a value to the next code, which changes results by more than a rounding.
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert float(error) < 2e-2
