"""GEMMs with integer weights under Triton's interpreter, against the references."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_kernels import integer_inputs
from tokenspeed_kernels.reference import fp8, int8, moe_w4a16, w4a16
from tokenspeed_kernels.triton.linear import gemm_int8, gemm_w4a16
from tokenspeed_kernels.triton.moe import experts_w4a16
from tokenspeed_kernels.triton.quantize import integer

pytestmark = pytest.mark.interpreter
CPU = torch.device("cpu")


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("in_size", "out_size", "group_size", "num_splits"),
    [(128, 50, 32, 1), (384, 70, 128, 3), (192, 64, 64, 2), (96, 48, 0, 1)],
)
def test_w4a16_matches_the_reference(
    in_size: int, out_size: int, group_size: int, num_splits: int
) -> None:
    problem = {
        "in_size": in_size,
        "out_size": out_size,
        "group_size": group_size,
        "dtype": "float16",
    }
    tiling = gemm_w4a16.Tiling(64, 4, 2, num_splits)
    kernel = gemm_w4a16.LinearW4A16Kernel(problem, tiling)
    for num_rows in (0, 1, 12, 70):
        given = integer_inputs.linear_w4a16(problem, num_rows, CPU, generator(), strided=True)
        expected = w4a16.linear_w4a16(problem)(**given)
        # Splits count on counters that the previous call has reset.
        for _ in range(num_splits):
            torch.testing.assert_close(kernel(**given), expected, rtol=4e-3, atol=4e-3)


def test_mxfp4_matches_the_reference() -> None:
    problem = {"in_size": 96, "out_size": 40, "dtype": "float16"}
    kernel = gemm_w4a16.linear_mxfp4(problem)
    for num_rows in (1, 12, gemm_w4a16.MAX_ROWS + 1):
        given = integer_inputs.linear_mxfp4(problem, num_rows, CPU, generator(), strided=True)
        expected = w4a16.linear_mxfp4(problem)(**given)
        torch.testing.assert_close(kernel(*given.values()), expected, rtol=4e-3, atol=4e-3)


def test_many_rows_use_the_converted_weight() -> None:
    problem = {"in_size": 96, "out_size": 40, "group_size": 32, "dtype": "float16"}
    num_rows = gemm_w4a16.MAX_ROWS + 1
    given = integer_inputs.linear_w4a16(problem, num_rows, CPU, generator(), strided=False)
    weight = w4a16.dequantize_int4(given["weight"], given["scale"], given["zero"])
    kernel = gemm_w4a16.linear_w4a16(problem)
    assert isinstance(kernel, gemm_w4a16.LinearW4A16Kernel)
    found = kernel.dequantize(given["weight"], given["scale"], given["zero"])
    torch.testing.assert_close(found, weight.half(), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(
        kernel(**given), w4a16.linear_w4a16(problem)(**given), rtol=4e-3, atol=4e-3
    )


@pytest.mark.parametrize(("in_size", "out_size"), [(96, 48), (100, 70)])
def test_int8_matches_the_reference(in_size: int, out_size: int) -> None:
    problem = {"in_size": in_size, "out_size": out_size, "dtype": "float16"}
    for tiling in (None, gemm_int8.Tiling(16, 32, 32, 4, 2, 3)):
        kernel = gemm_int8.LinearInt8Kernel(problem, tiling)
        for num_rows in (0, 1, 70):
            given = integer_inputs.linear_int8(problem, num_rows, CPU, generator(), strided=True)
            expected = int8.linear_int8(problem)(**given)
            for _ in range(2):
                torch.testing.assert_close(kernel(**given), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_static_scales_are_applied(dtype: str) -> None:
    problem = {"size": 200, "dtype": dtype}
    given = integer_inputs.quantize_static(problem, 7, CPU, generator(), strided=True)
    for name, module in (("quantize_int8_static", int8), ("quantize_fp8_static", fp8)):
        codes, scale = getattr(module, name)(problem)(**given)
        found, found_scale = getattr(integer, name)(problem)(**given)
        assert torch.equal(found_scale, scale)
        if codes.dtype == torch.int8:
            assert torch.equal(found, codes)
            continue
        # The interpreter truncates when it converts to e4m3, and loses the carry.
        sure = codes.view(torch.uint8) & 7 != 0
        same = torch.isclose(found.float()[sure], codes.float()[sure], rtol=0.13, atol=4e-3)
        assert same.sum() >= 0.98 * sure.sum()


@pytest.mark.parametrize("group_size", [32, 0])
def test_w4a16_experts_match_the_reference(group_size: int) -> None:
    problem = {
        "num_experts": 3,
        "top_k": 2,
        "hidden_size": 64,
        "intermediate_size": 32,
        "group_size": group_size,
        "dtype": "float16",
    }
    for num_rows in (1, 6):
        given = integer_inputs.moe_experts_w4a16(problem, num_rows, CPU, generator(), strided=True)
        expected = moe_w4a16.moe_experts_w4a16(problem)(*given.values())
        found = experts_w4a16.moe_experts_w4a16(problem)(*given.values())
        torch.testing.assert_close(found, expected, rtol=4e-3, atol=4e-3)


def test_mxfp4_experts_match_the_reference() -> None:
    problem = {
        "num_experts": 3,
        "top_k": 2,
        "hidden_size": 96,
        "intermediate_size": 32,
        "dtype": "float16",
    }
    for num_rows in (0, 1, 6):
        given = integer_inputs.moe_experts_mxfp4(problem, num_rows, CPU, generator(), strided=True)
        expected = moe_w4a16.moe_experts_mxfp4(problem)(*given.values())
        found = experts_w4a16.moe_experts_mxfp4(problem)(*given.values())
        torch.testing.assert_close(found, expected, rtol=4e-3, atol=4e-3)
