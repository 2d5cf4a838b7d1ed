# mypy: allow-untyped-calls
"""Find the best tilings of the FP8 GEMM for few rows on this GPU, compared with torch._scaled_mm.

    python benchmarks/linear_fp8_tilings.py [--rows 1 16 32 64] [--few-only]

Each shape is timed in a CUDA graph over copies of its weight that together exceed the L2 cache: medians of 7, after a
check against float64. Then times torch._scaled_mm for many rows, with and without fast accumulation, and bfloat16.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from tokenspeed_kernels.reference.fp8 import quantize_rows
from tokenspeed_kernels.triton.linear.gemm_fp8 import MAX_ROWS, FewRows, Tiling, tiling_of

SHAPES = {  # name: (out_size, in_size)
    "8b qkv": (6144, 4096),
    "8b o": (4096, 4096),
    "8b gate_up": (24576, 4096),
    "8b down": (4096, 12288),
}
COLD_BYTES = 400_000_000  # of weight copies, several times the L2 cache
TOLERANCE = 6e-3  # relative, of bfloat16 results
MANY = (128, 256, 2048, 8192)

Weight = tuple[Tensor, Tensor]


def micros(call: Callable[[Weight], Tensor], weights: Sequence[Weight]) -> float:
    """Return the microseconds per call, in a CUDA graph over all weights."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for weight in weights[:2]:
            call(weight)
        with torch.cuda.graph(graph, stream=stream):
            for weight in weights:
                call(weight)
    times: list[float] = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / len(weights) * 1e3)
    return statistics.median(times)


def tilings(num_rows: int) -> Iterator[Tiling]:
    """Yield the tilings to time."""
    few = ((64, 128, 4, 4), (64, 128, 4, 8), (64, 256, 4, 4))
    for block_n, block_k, num_warps, num_stages in (
        few if num_rows <= 64 else ((64, 128, 4, 4), (128, 128, 8, 4))
    ):
        for num_splits in (1, 2, 3, 4) if num_rows <= 64 else (1, 2, 4):
            if (block_n + max(16, num_rows)) * block_k * num_stages < 230_000:
                yield Tiling(block_n, block_k, num_warps, num_stages, num_splits)


def scaled(x: Tensor, x_scale: Tensor, weight: Weight, *, quick: bool = True) -> Tensor:
    """Return the result of torch._scaled_mm."""
    return torch._scaled_mm(
        x,
        weight[0].t(),
        scale_a=x_scale,
        scale_b=weight[1].t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=quick,
    )


def few(name: str, num_rows: int, weights: Sequence[Weight]) -> None:
    """Print the best tilings of a shape for few rows."""
    out_size, in_size = weights[0][0].shape
    x, x_scale = quantize_rows(torch.randn(num_rows, in_size, device="cuda"))
    exact = (x.double() * x_scale.double()) @ (weights[0][0].double() * weights[0][1].double()).T
    found = []
    ours = tiling_of(out_size, in_size)
    for tiling in {*tilings(num_rows), *((ours,) if num_rows <= MAX_ROWS else ())}:
        if tiling.num_splits > 1 and out_size >= 16384:
            continue
        multiply = FewRows(out_size, in_size, torch.bfloat16, tiling)
        got = multiply(x, x_scale, *weights[0], None)
        error = float((got.double() - exact).norm() / exact.norm())
        if not error < TOLERANCE:
            raise SystemExit(f"{name}, {num_rows} rows, {tiling}: wrong result, error {error}")
        found.append((micros(lambda w: multiply(x, x_scale, *w, None), weights), tiling))  # noqa: B023
    found.sort(key=lambda each: each[0])
    chosen = next((took for took, tiling in found if tiling == ours), float("nan"))
    torchs = micros(lambda w: scaled(x, x_scale, w), weights)
    best = "; ".join(f"{took:.1f} {astuple(t)}" for took, t in found[:4])
    print(
        f"{name:11} {num_rows:3} rows: torch {torchs:6.1f} us, chosen {chosen:6.1f}, best {best}",
        flush=True,
    )


def many(name: str, weights: Sequence[Weight]) -> None:
    """Print the rates of a shape for many rows, in TFLOP/s."""
    out_size, in_size = weights[0][0].shape
    wide = weights[0][0].to(torch.bfloat16)
    for num_rows in MANY:
        plain = torch.randn(num_rows, in_size, device="cuda", dtype=torch.bfloat16)
        x, x_scale = quantize_rows(plain)
        few_weights = weights[: 4 if num_rows > 512 else len(weights)]
        rates = [
            2e-6 * num_rows * out_size * in_size / micros(call, few_weights)
            for call in (
                partial(scaled, x, x_scale),
                partial(scaled, x, x_scale, quick=False),
                lambda w, x=plain: functional.linear(x, wide),
            )
        ]
        quick, exact, wider = rates
        print(
            f"{name:11} {num_rows:5} rows: quick {quick:6.0f}, exact {exact:6.0f}, bf16 {wider:6.0f}",
            flush=True,
        )


def main() -> None:
    """Time all shapes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32, 64], help="rows to time")
    parser.add_argument("--few-only", action="store_true", help="skip the rates for many rows")
    options = parser.parse_args()
    for name, (out_size, in_size) in SHAPES.items():
        weights = [
            quantize_rows(torch.randn(out_size, in_size, device="cuda") / in_size**0.5)
            for _ in range(2 + COLD_BYTES // (out_size * in_size))
        ]
        for num_rows in options.rows:
            few(name, num_rows, weights)
        if not options.few_only:
            many(name, weights)


if __name__ == "__main__":
    main()
