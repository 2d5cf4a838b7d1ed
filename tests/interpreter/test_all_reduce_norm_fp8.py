"""The fused all-reduce with FP8 quantization: the same bits as the unquantized one and a quantization kernel."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernels.reference import fp8, fp8_block
from tokenspeed_kernels.triton.comm import all_reduce_norm
from tokenspeed_kernels.triton.quantize.fp8_per_group import quantize_fp8_groups
from tokenspeed_kernels.triton.quantize.fp8_per_token import quantize_fp8

sys.path.insert(0, str(Path(__file__).parent))

from test_all_reduce_norm import EPS, World, expected, inputs, run, world

pytestmark = pytest.mark.interpreter
CANARY = 3.0
NUM_SCALES: Mapping[str, Callable[[int], int]] = {
    "fp8": lambda size: 1,
    "fp8_groups": lambda size: ceil(size / 128),
}
KERNELS: Mapping[str, Callable[..., Any]] = {
    "fp8": quantize_fp8,
    "fp8_groups": quantize_fp8_groups,
}
REFERENCES: Mapping[str, Callable[..., Any]] = {
    "fp8": fp8.quantize_fp8,
    "fp8_groups": fp8_block.quantize_fp8_groups,
}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce_norm, "NUM_PROGRAMS", 4)


def run_quantizing(
    where: World, x: Tensor, residual: Tensor, weight: Tensor
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return the codes, scales and residual of each process. Fails if a kernel writes beyond the last row."""
    num_processes, num_rows, size = x.shape
    num_scales = where.kernels[0].num_scales
    residuals = [residual.clone() for _ in range(num_processes)]
    codes = torch.full((num_processes, 2 * num_rows, size), CANARY).to(torch.float8_e4m3fn)
    scales = torch.full((num_processes, 2 * num_rows, num_scales), CANARY)
    for phase in ("send", "receive"):
        for rank, kernel in enumerate(where.kernels):
            kernel.launch(
                x[rank],
                residuals[rank],
                weight,
                codes[rank],
                EPS,
                scales[rank],
                send=phase == "send",
                receive=phase == "receive",
            )
    assert bool((codes[:, num_rows:].float() == CANARY).all())
    assert bool((scales[:, num_rows:] == CANARY).all())
    return list(zip(codes[:, :num_rows], scales[:, :num_rows], residuals, strict=True))


CASES = (
    (2, 1, 64, "float32"),
    (2, 23, 200, "float16"),
    (2, 3, 1100, "bfloat16"),
    (4, 5, 1024, "float16"),
    (4, 10, 129, "float32"),
)
SLOW = (("fp8", CASES[1]), ("fp8_groups", CASES[3]), ("fp8", CASES[4]))


@pytest.mark.parametrize(
    ("form", "num_processes", "num_rows", "size", "dtype"),
    [
        pytest.param(form, *case, marks=pytest.mark.release if (form, case) in SLOW else ())
        for form in NUM_SCALES
        for case in CASES
    ],
)
def test_codes_equal_separate_kernels_bitwise(
    form: str, num_processes: int, num_rows: int, size: int, dtype: str
) -> None:
    x, residual, weight = inputs(num_processes, num_rows, size, dtype)
    plain = run(world(num_processes, size, num_rows, dtype), x, residual, weight)
    problem = {"size": size, "dtype": dtype}
    quantizing = world(num_processes, size, num_rows, dtype, NUM_SCALES[form](size))
    results = run_quantizing(quantizing, x, residual, weight)
    for (codes, scale, total), (rows, plain_total) in zip(results, plain, strict=True):
        separate_codes, separate_scale = KERNELS[form](problem)(rows)
        assert torch.equal(codes.view(torch.uint8), separate_codes.view(torch.uint8))
        assert torch.equal(scale, separate_scale)
        assert torch.equal(total, plain_total)


@pytest.mark.parametrize("form", NUM_SCALES)
def test_successive_calls_match_the_reference(form: str) -> None:
    size = 300
    where = world(2, size, 70, "float32", NUM_SCALES[form](size))
    quantize = REFERENCES[form]({"size": size, "dtype": "float32"})
    for call, num_rows in enumerate((3, 26, 1, 0, 5)):
        x, residual, weight = inputs(2, num_rows, size, "float32", seed=call)
        rows, total = expected(x, residual, weight)
        wanted_codes, wanted_scale = quantize(rows)
        # The interpreter halves values that round up to a power of two.
        checked = wanted_codes.view(torch.uint8) % 8 > 0
        for codes, scale, found in run_quantizing(where, x, residual, weight):
            torch.testing.assert_close(scale, wanted_scale, rtol=1e-5, atol=0)
            # A value halfway between two codes may round to either.
            torch.testing.assert_close(
                codes.float()[checked], wanted_codes.float()[checked], rtol=0.13, atol=4e-3
            )
            torch.testing.assert_close(found, total, rtol=1e-5, atol=1e-5)
