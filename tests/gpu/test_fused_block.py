"""The fused decoder block on a GPU, including its grid-wide barrier."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenspeed_testing.conformance import make_inputs
from tokenspeed_testing.shapes import contract_of
from torch import Tensor

from tokenspeed_kernels.descriptors import TRITON_LINEAR
from tokenspeed_kernels.reference import fused_linear
from tokenspeed_kernels.triton.fused.fused_block import fused_block
from tokenspeed_kernels.triton.fused.fused_block_in_place import fused_block_in_place

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs Hopper",
    ),
]
CUDA = torch.device("cuda")
QWEN3_06B = {"in_size": 2048, "hidden_size": 1024, "intermediate_size": 3072, "out_size": 4096}
QWEN3_8B = {"in_size": 4096, "hidden_size": 4096, "intermediate_size": 12288, "out_size": 6144}
ODD = {"in_size": 320, "hidden_size": 704, "intermediate_size": 1344, "out_size": 960}


def inputs(
    shape: dict[str, int], num_rows: int, dtype: str = "bfloat16"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a problem and inputs for its kernel."""
    (spec,) = (spec for spec in TRITON_LINEAR if spec.op == "fused_block")
    problem = {**shape, "max_rows": 64, "dtype": dtype}
    return problem, make_inputs(contract_of(spec), problem, num_rows, CUDA, strided=False)


def distance(found: Tensor, expected: Tensor) -> float:
    """Return the relative error in the Euclidean norm."""
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("shape", [QWEN3_06B, QWEN3_8B, ODD], ids=["qwen3-0.6b", "qwen3-8b", "odd"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_fused_block_is_as_accurate_as_separate_kernels(shape: dict[str, int], dtype: str) -> None:
    for num_rows in (1, 2, 17, 64):
        problem, given = inputs(shape, num_rows, dtype)
        exact = {
            name: value.double() if isinstance(value, Tensor) else value
            for name, value in given.items()
        }
        found = fused_block(problem)(*given.values())
        expected = fused_linear.fused_block({**problem, "dtype": "float64"})(*exact.values())
        parts = fused_linear.fused_block(problem)(*given.values())
        for got, part, want in zip(found, parts, expected, strict=True):
            assert distance(got, want) < 1.1 * distance(part, want) + 1e-5


def test_fused_block_replays_bitwise_equal() -> None:
    problem, given = inputs(QWEN3_06B, 33)
    kernel = fused_block(problem)
    x, residual, *weights = given.values()

    def layers() -> list[Tensor]:
        found, total = [], residual
        for _ in range(8):
            y, total = kernel(x, total, *weights)
            found += [y, total]
        return found

    expected = layers()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        found = layers()
    for _ in range(50):
        for tensor in found:
            tensor.zero_()
        graph.replay()
        torch.cuda.synchronize()
        for got, want in zip(found, expected, strict=True):
            assert torch.equal(got, want)


def test_two_streams_do_not_deadlock() -> None:
    problem, given = inputs(QWEN3_06B, 64)
    kernels, streams = (
        [fused_block(problem) for _ in range(2)],
        [torch.cuda.Stream() for _ in range(2)],
    )
    expected = [tensor.clone() for tensor in kernels[0](*given.values())]
    torch.cuda.synchronize()
    results = []
    for _ in range(200):
        for kernel, stream in zip(kernels, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(kernel(*given.values()))
    torch.cuda.synchronize()
    for result in results:
        for got, want in zip(result, expected, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("num_rows", [2048, 3000])
def test_in_place_block_is_as_accurate_as_separate_kernels(num_rows: int) -> None:
    problem, given = inputs(ODD, num_rows)
    exact = {
        name: value.double() if isinstance(value, Tensor) else value
        for name, value in given.items()
    }
    expected = fused_linear.fused_block({**problem, "dtype": "float64"})(*exact.values())
    parts = fused_linear.fused_block(problem)(*given.values())
    y, residual = fused_block_in_place(problem)(*given.values())
    assert residual is given["residual"]
    for got, part, want in zip((y, residual), parts, expected, strict=True):
        assert distance(got, want) < 1.1 * distance(part, want) + 1e-5
