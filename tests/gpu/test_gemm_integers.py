"""GEMMs with integer weights on a GPU at model sizes, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tokenspeed_kernels import integer_inputs
from tokenspeed_kernels.reference import moe_w4a16
from tokenspeed_kernels.reference.int8 import linear_int8
from tokenspeed_kernels.reference.w4a16 import dequantize_e2m1, dequantize_int4, linear_mxfp4
from tokenspeed_kernels.triton.linear import gemm_int8, gemm_w4a16
from tokenspeed_kernels.triton.moe import experts_w4a16

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CUDA = torch.device("cuda")


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("in_size", "out_size", "group_size"),
    [(4096, 4096, 128), (12288, 4096, 128), (4096, 24576, 64), (2048, 1030, 32), (896, 4864, 0)],
)
@pytest.mark.parametrize("num_rows", [1, 2, 12, 33, 64, 130, 257])
def test_w4a16_at_model_sizes(
    num_rows: int, in_size: int, out_size: int, group_size: int, dtype: str
) -> None:
    problem = {
        "in_size": in_size,
        "out_size": out_size,
        "group_size": group_size,
        "dtype": dtype,
    }
    seed = torch.Generator().manual_seed(1)
    given = integer_inputs.linear_w4a16(problem, num_rows, CUDA, seed, strided=True)
    x, order, bias = given["x"].double(), given["order"], given["bias"]
    weight = dequantize_int4(given["weight"], given["scale"], given["zero"])
    expected = (x if order is None else x[:, order.long()]) @ weight.double().T
    expected = expected if bias is None else expected + bias.double()
    kernel = gemm_w4a16.linear_w4a16(problem)
    # Splits count on counters that the previous call has reset.
    for _ in range(2):
        assert error(kernel(**given), expected) < (6e-3 if dtype == "bfloat16" else 1e-3)


@pytest.mark.parametrize("has_asm", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_converted_codes_are_exact(dtype: str, *, has_asm: bool) -> None:
    problem = {"in_size": 64, "out_size": 64, "group_size": 32, "dtype": dtype}
    kernel = gemm_w4a16.LinearW4A16Kernel(problem)
    kernel._has_asm = has_asm
    seed = torch.Generator().manual_seed(2)
    given = integer_inputs.linear_w4a16(problem, 64, CUDA, seed, strided=False)
    ones = torch.ones_like(given["scale"])
    x = torch.eye(64, device=CUDA, dtype=getattr(torch, dtype))
    for zero in (None, given["zero"]):
        expected = dequantize_int4(given["weight"], ones, zero)
        found = kernel.multiply(x, given["weight"], ones, zero, None)
        assert torch.equal(found.float(), expected.T)


@pytest.mark.parametrize("has_asm", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_converted_e2m1_codes_are_exact(dtype: str, *, has_asm: bool) -> None:
    problem = {"in_size": 64, "out_size": 64, "group_size": 32, "dtype": dtype}
    kernel = gemm_w4a16.LinearW4A16Kernel(problem, is_e2m1=True)
    kernel._has_asm = has_asm
    seed = torch.Generator().manual_seed(6)
    given = integer_inputs.linear_mxfp4(problem, 64, CUDA, seed, strided=False)
    ones = torch.full_like(given["scale"], 127)
    x = torch.eye(64, device=CUDA, dtype=getattr(torch, dtype))
    found = kernel.multiply(x, given["weight"], ones, None, None)
    assert torch.equal(found.float(), dequantize_e2m1(given["weight"], ones).T)


@pytest.mark.parametrize("num_rows", [1, 12, 130, 300])
def test_mxfp4_at_model_sizes(num_rows: int) -> None:
    problem = {"in_size": 4096, "out_size": 6144, "dtype": "bfloat16"}
    seed = torch.Generator().manual_seed(7)
    given = integer_inputs.linear_mxfp4(problem, num_rows, CUDA, seed, strided=True)
    expected = linear_mxfp4({"dtype": "float32"})(**given)
    found = gemm_w4a16.linear_mxfp4(problem)(*given.values())
    assert error(found, expected.double()) < 6e-3


def test_w4a16_is_the_same_in_a_graph() -> None:
    problem = {"in_size": 4096, "out_size": 4096, "group_size": 128, "dtype": "bfloat16"}
    seed = torch.Generator().manual_seed(3)
    given = integer_inputs.linear_w4a16(problem, 12, CUDA, seed, strided=False)
    kernel = gemm_w4a16.linear_w4a16(problem)
    expected = kernel(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernel(**given)
    for _ in range(3):
        graph.replay()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("group_size", [128, 32])
@pytest.mark.parametrize("num_rows", [1, 6, 40, 300])
def test_w4a16_experts_at_model_sizes(num_rows: int, group_size: int) -> None:
    problem = {
        "num_experts": 32,
        "top_k": 8,
        "hidden_size": 2048,
        "intermediate_size": 768,
        "group_size": group_size,
        "dtype": "bfloat16",
    }
    seed = torch.Generator().manual_seed(5)
    given = integer_inputs.moe_experts_w4a16(problem, num_rows, CUDA, seed, strided=True)
    expected = moe_w4a16.moe_experts_w4a16(problem)(*given.values())
    found = experts_w4a16.moe_experts_w4a16(problem)(*given.values())
    assert error(found, expected.double()) < 1e-2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("num_rows", [1, 6, 40, 300])
def test_mxfp4_experts_at_model_sizes(num_rows: int, dtype: str) -> None:
    problem = {
        "num_experts": 32,
        "top_k": 8,
        "hidden_size": 2048,
        "intermediate_size": 768,
        "dtype": dtype,
    }
    seed = torch.Generator().manual_seed(8)
    given = integer_inputs.moe_experts_mxfp4(problem, num_rows, CUDA, seed, strided=True)
    expected = moe_w4a16.moe_experts_mxfp4(problem)(*given.values())
    found = experts_w4a16.moe_experts_mxfp4(problem)(*given.values())
    assert error(found, expected.double()) < (1e-2 if dtype == "bfloat16" else 2e-3)


@pytest.mark.parametrize(
    ("in_size", "out_size"), [(4096, 4096), (12288, 4096), (4096, 24576), (1000, 1030)]
)
@pytest.mark.parametrize("num_rows", [1, 12, 64, 65, 300])
def test_int8_at_model_sizes(num_rows: int, in_size: int, out_size: int) -> None:
    problem = {"in_size": in_size, "out_size": out_size, "dtype": "bfloat16"}
    seed = torch.Generator().manual_seed(4)
    given = integer_inputs.linear_int8(problem, num_rows, CUDA, seed, strided=True)
    kernel = gemm_int8.linear_int8(problem)
    expected = linear_int8(problem)(**given)
    for _ in range(2):
        # Integer sums are exact; only the last rounding may differ.
        torch.testing.assert_close(kernel(**given), expected, rtol=8e-3, atol=1e-5)
