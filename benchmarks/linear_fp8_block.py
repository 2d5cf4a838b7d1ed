"""Time block-wise FP8 GEMMs on this GPU: tilings for few rows, and the alternatives for many rows.

    python benchmarks/linear_fp8_block.py [--rows 1 8 16 32 64] [--many 65 128 256 512 1024 2048 8192]

Measured as in `linear_fp8_tilings.py`, after a check against float64. `chosen` is the op itself, `torch` is
torch._scaled_mm, numbers are tilings of the tiled GEMM, `deepgemm` is the plugin's kernel if its library is installed,
and `row` uses per-token and per-channel scales.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from functools import partial
from importlib import import_module

import torch
from linear_fp8_tilings import COLD_BYTES, SHAPES, TOLERANCE, micros, scaled
from torch import Tensor

from tokenspeed_kernels.reference.fp8 import quantize_rows
from tokenspeed_kernels.reference.fp8_block import (
    quantize_blocks,
    quantize_groups,
    spread_blocks,
    spread_groups,
)
from tokenspeed_kernels.triton.linear.gemm_fp8 import FewRows, Tiling
from tokenspeed_kernels.triton.linear.gemm_fp8_block import (
    LinearFp8BlockKernel,
    ManyTiling,
    few_tiling,
    library_takes,
    multiply_tiles,
)
from tokenspeed_kernels.triton.quantize.fp8_per_group import GROUP

Weight = tuple[Tensor, Tensor]
DTYPE = torch.bfloat16
TILINGS = (
    ManyTiling(128, 128, 8, 3),
    ManyTiling(64, 128, 4, 4),
    ManyTiling(64, 64, 4, 4),
    ManyTiling(128, 64, 4, 4),
)


def few_tilings() -> Iterator[Tiling]:
    """Yield the tilings for few rows."""
    for block_n, num_warps, num_stages in (
        (64, 4, 4),
        (64, 4, 8),
        (64, 4, 6),
        (128, 4, 6),
        (128, 8, 4),
    ):
        for num_splits in (1, 2, 3, 4, 6, 8):
            yield Tiling(block_n, GROUP, num_warps, num_stages, num_splits)


def check(name: str, found: Tensor, exact: Tensor) -> None:
    """Exit if a result is wrong."""
    error = float((found.double() - exact).norm() / exact.norm())
    if not error < TOLERANCE:
        raise SystemExit(f"{name}: wrong result, error {error}")


def few(name: str, num_rows: int, weights: Sequence[Weight]) -> None:
    """Print the best tilings of a shape for few rows."""
    out_size, in_size = weights[0][0].shape
    x, x_scale = quantize_groups(torch.randn(num_rows, in_size, device="cuda"))
    exact = wide(x, x_scale, *weights[0])
    found, ours = [], few_tiling(out_size, in_size, num_rows)
    for tiling in {*few_tilings(), ours}:
        if tiling.num_splits > 1 and out_size >= 16384:
            continue
        multiply = FewRows(out_size, in_size, DTYPE, tiling, GROUP)
        check(f"{name}, {num_rows} rows, {tiling}", multiply(x, x_scale, *weights[0], None), exact)
        found.append((micros(lambda w: multiply(x, x_scale, *w, None), weights), tiling))  # noqa: B023
    found.sort(key=lambda each: each[0])
    chosen = next(took for took, tiling in found if tiling == ours)
    best = "; ".join(f"{took:.1f} {astuple(t)}" for took, t in found[:5])
    print(f"{name:11} {num_rows:3} rows: chosen {chosen:6.1f} us, best {best}", flush=True)


def wide(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Return the result in float64."""
    left = x.double() * spread_groups(x_scale, x.shape[1]).double()
    return left @ (weight.double() * spread_blocks(weight_scale, *weight.shape).double()).T


def many(name: str, num_rows: int, weights: Sequence[Weight]) -> None:
    """Print the time of each alternative for many rows."""
    out_size, in_size = weights[0][0].shape
    plain = torch.randn(num_rows, in_size, device="cuda")
    x, x_scale = quantize_groups(plain)
    exact = wide(x, x_scale, *weights[0])
    problem = {"in_size": in_size, "out_size": out_size, "dtype": "bfloat16"}
    ours = LinearFp8BlockKernel(problem)
    calls: dict[str, Callable[[Weight], Tensor]] = {"chosen": lambda w: ours(x, x_scale, *w, None)}
    if library_takes(problem):
        calls["torch"] = lambda w: ours.by_library(x, x_scale, *w, None)
    calls |= {str(astuple(each)): partial(_tiles, x, x_scale, each) for each in TILINGS}
    if importlib.util.find_spec("deep_gemm") and importlib.util.find_spec(
        "tokenspeed_kernels_deepgemm"
    ):
        theirs = import_module("tokenspeed_kernels_deepgemm.linear").linear_fp8_block(problem)
        calls["deepgemm"] = lambda w: theirs(x, x_scale, *w, None)
    took = {}
    some = weights[: 4 if num_rows > 512 else len(weights)]
    for label, call in calls.items():
        check(f"{name}, {num_rows} rows, {label}", call(weights[0]), exact)
        took[label] = micros(call, some)
    rows = quantize_rows(plain)
    row_scales = torch.ones((out_size, 1), device="cuda")
    took["row"] = micros(lambda w: scaled(*rows, (w[0], row_scales)), some)
    flops = 2e-6 * num_rows * out_size * in_size
    text = ", ".join(f"{label} {each:.1f} ({flops / each:.0f})" for label, each in took.items())
    print(f"{name:11} {num_rows:5} rows, us (TFLOP/s): {text}", flush=True)


def _tiles(x: Tensor, x_scale: Tensor, tiling: ManyTiling, weight: Weight) -> Tensor:
    return multiply_tiles(x, x_scale, *weight, None, DTYPE, tiling)


def main() -> None:
    """Time all shapes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=int, nargs="*", default=[1, 8, 16, 32, 64], help="few rows: time all tilings"
    )
    parser.add_argument(
        "--many",
        type=int,
        nargs="*",
        default=[65, 128, 256, 512, 1024, 2048, 8192],
        help="many rows: time the alternatives",
    )
    options = parser.parse_args()
    for name, (out_size, in_size) in SHAPES.items():
        weights = [
            quantize_blocks(torch.randn(out_size, in_size, device="cuda") / in_size**0.5)
            for _ in range(2 + COLD_BYTES // (out_size * in_size))
        ]
        for num_rows in options.rows:
            few(name, num_rows, weights)
        for num_rows in options.many:
            many(name, num_rows, weights)


if __name__ == "__main__":
    main()
