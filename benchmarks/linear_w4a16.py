# mypy: allow-untyped-calls
"""Time linear layers with 4-bit weights on this GPU, next to their lower bound and bfloat16 cuBLAS.

    python benchmarks/linear_w4a16.py [--rows 1 16 64 256 4096] [--sweep] [--int8]

Shapes are those of Qwen3-8B, with groups of 128. Measured as in `linear_fp8_tilings.py`, after a check against
float64. The floor is the time to read the weight and its scales once at the bandwidth of `--bandwidth`. `converted`
converts the weight and calls cuBLAS, whatever the number of rows; `asymmetric` has zero points. `--sweep` prints the
best tilings for few rows, `--int8` times `linear_int8` instead.
"""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import astuple

import torch
from linear_fp8_tilings import COLD_BYTES, SHAPES, TOLERANCE, micros
from torch import Tensor
from torch.nn import functional

from tokenspeed_kernels.reference.int8 import quantize_rows
from tokenspeed_kernels.reference.w4a16 import dequantize_int4
from tokenspeed_kernels.triton.linear import gemm_int8, gemm_w4a16

GROUP = 128
DTYPE = torch.bfloat16


def check(name: str, found: Tensor, exact: Tensor) -> None:
    """Exit if a result is wrong."""
    error = float((found.double() - exact).norm() / exact.norm())
    if not error < TOLERANCE:
        raise SystemExit(f"{name}: wrong result, error {error}")


def problem_of(out_size: int, in_size: int) -> dict[str, int | str]:
    """Return the problem of a shape."""
    return {"in_size": in_size, "out_size": out_size, "group_size": GROUP, "dtype": "bfloat16"}


def make_weights(out_size: int, in_size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return copies of a packed weight with scales and zero points that together exceed the L2 cache."""
    groups = (out_size, in_size // GROUP)
    count = max(2, COLD_BYTES // (out_size * in_size // 2))
    return [
        (
            torch.randint(0, 256, (out_size, in_size // 2), dtype=torch.uint8, device="cuda"),
            (torch.rand(groups, device="cuda") + 0.5).div_(8 * in_size**0.5).to(DTYPE),
            torch.randint(0, 16, groups, dtype=torch.uint8, device="cuda"),
        )
        for _ in range(count)
    ]


def tilings(num_rows: int) -> Iterator[gemm_w4a16.Tiling]:
    """Yield tilings to time."""
    for block_n, num_warps in ((64, 4), (128, 4), (128, 8)):
        for num_stages in (3, 4, 6, 8):
            for num_splits in (1, 2, 3, 4, 6, 8) if num_rows <= 64 else (1,):
                yield gemm_w4a16.Tiling(block_n, num_warps, num_stages, num_splits)


def sweep(name: str, num_rows: int, weights: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Print the best tilings of a shape."""
    out_size, in_size = weights[0][0].shape[0], weights[0][0].shape[1] * 2
    x = torch.randn(num_rows, in_size, device="cuda").to(DTYPE)
    values = dequantize_int4(weights[0][0], weights[0][1], None)
    exact = x.double() @ values.double().T
    ours = gemm_w4a16.tiling_of(out_size, in_size, num_rows)
    found = []
    for tiling in {*tilings(num_rows), ours}:
        kernel = gemm_w4a16.LinearW4A16Kernel(problem_of(out_size, in_size), tiling)

        def call(w: tuple[Tensor, Tensor, Tensor], kernel: object = kernel) -> Tensor:
            assert isinstance(kernel, gemm_w4a16.LinearW4A16Kernel)
            return kernel.multiply(x, w[0], w[1], None, None)

        try:
            check(f"{name}, {num_rows} rows, {tiling}", call(weights[0]), exact)
            found.append((micros(call, weights), tiling))  # type: ignore[arg-type]
        except RuntimeError as error:  # too much shared memory
            print(f"{name}, {num_rows} rows, {tiling}: {str(error).splitlines()[0]}")
    found.sort(key=lambda each: each[0])
    chosen = next((took for took, tiling in found if tiling == ours), float("nan"))
    best = "; ".join(f"{took:.1f} {astuple(t)}" for took, t in found[:5])
    print(f"{name:11} {num_rows:4} rows: chosen {chosen:6.1f} us, best {best}", flush=True)


def compare(
    name: str, num_rows: int, weights: list[tuple[Tensor, Tensor, Tensor]], bandwidth: float
) -> None:
    """Print the time of our kernel, the floor and the alternatives."""
    out_size, in_size = weights[0][0].shape[0], weights[0][0].shape[1] * 2
    x = torch.randn(num_rows, in_size, device="cuda").to(DTYPE)
    kernel = gemm_w4a16.LinearW4A16Kernel(problem_of(out_size, in_size))
    calls: dict[str, Callable[[tuple[Tensor, Tensor, Tensor]], Tensor]] = {
        "ours": lambda w: kernel(x, w[0], w[1], None, None, None),
        "asymmetric": lambda w: kernel(x, *w, None, None),
        "converted": lambda w: functional.linear(x, kernel.dequantize(w[0], w[1], None)),
    }
    if num_rows > 64:
        calls["packed"] = lambda w: kernel.multiply(x, w[0], w[1], None, None)
    some = weights[: 4 if num_rows > 256 else len(weights)]
    took = {}
    for label, call in calls.items():
        zero = weights[0][2] if label == "asymmetric" else None
        values = dequantize_int4(weights[0][0], weights[0][1], zero)
        check(f"{name}, {num_rows} rows, {label}", call(weights[0]), x.double() @ values.double().T)
        took[label] = micros(call, some)  # type: ignore[arg-type]
    count = max(2, COLD_BYTES // (2 * out_size * in_size))
    wide = [torch.randn(out_size, in_size, device="cuda").to(DTYPE) for _ in range(count)]
    took["cuBLAS bf16"] = micros(lambda w: functional.linear(x, w), wide)  # type: ignore[arg-type]
    num_bytes = sum(each.nbytes for each in weights[0][:2]) + 2 * num_rows * (out_size + in_size)
    floor = num_bytes / bandwidth * 1e6
    text = ", ".join(f"{label} {each:.1f}" for label, each in took.items())
    share = f"{100 * floor / took['ours']:.0f} % of the floor's speed"
    print(f"{name:11} {num_rows:4} rows: floor {floor:.1f} us, {text}; {share}", flush=True)


def compare_int8(name: str, num_rows: int, out_size: int, in_size: int, bandwidth: float) -> None:
    """Print the time of `linear_int8`, its floor, and bfloat16 cuBLAS."""
    count = max(2, COLD_BYTES // (out_size * in_size))
    plain = torch.randn(num_rows, in_size, device="cuda")
    x, x_scale = quantize_rows(plain)
    weights = [quantize_rows(torch.randn(out_size, in_size, device="cuda")) for _ in range(count)]
    exact = x.double() @ weights[0][0].double().T * x_scale.double() * weights[0][1].double().T
    problem = {"in_size": in_size, "out_size": out_size, "dtype": "bfloat16"}
    options = {"ours": None}
    for block_m, block_n, block_k, num_warps, num_stages in (
        (64, 128, 128, 4, 4),
        (128, 128, 128, 8, 4),
        (128, 256, 128, 8, 3),
    ):
        if num_rows > 64:
            options[f"{block_m}x{block_n}"] = gemm_int8.Tiling(  # type: ignore[assignment]
                block_m, block_n, block_k, num_warps, num_stages
            )
    if num_rows <= 64:
        for splits in (1, 2, 3, 4, 6, 8):
            block_m = max(16, 1 << (num_rows - 1).bit_length())
            options[f"{splits} splits"] = gemm_int8.Tiling(block_m, 64, 128, 4, 6, splits)  # type: ignore[assignment]
    took = {}
    for label, tiling in options.items():
        kernel = gemm_int8.LinearInt8Kernel(problem, tiling)

        def call(w: tuple[Tensor, Tensor], kernel: gemm_int8.LinearInt8Kernel = kernel) -> Tensor:
            return kernel(x, x_scale, *w, None)

        check(f"{name}, {num_rows} rows, {label}", call(weights[0]), exact)
        took[label] = micros(call, weights[: 4 if num_rows > 256 else count])
    dense = plain.to(DTYPE)
    wide = [
        torch.randn(out_size, in_size, device="cuda").to(DTYPE) for _ in range(max(2, count // 2))
    ]
    took["cuBLAS bf16"] = micros(lambda w: functional.linear(dense, w), wide)  # type: ignore[arg-type]
    floor = (out_size * (in_size + 4) + num_rows * (in_size + 2 * out_size)) / bandwidth * 1e6
    text = ", ".join(f"{label} {each:.1f}" for label, each in took.items())
    print(f"{name:11} {num_rows:4} rows: floor {floor:.1f} us, {text}", flush=True)


def main() -> None:
    """Time all shapes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 16, 64, 256, 4096], help="rows to time"
    )
    parser.add_argument(
        "--sweep", action="store_true", help="also print the best tilings for few rows"
    )
    parser.add_argument("--int8", action="store_true", help="time linear_int8 instead")
    parser.add_argument("--bandwidth", type=float, default=4.8e12, help="bytes per second")
    options = parser.parse_args()
    versions = f"torch {torch.__version__}, triton {importlib.metadata.version('triton')}"
    print(f"{torch.cuda.get_device_name()}, {versions}")
    for name, (out_size, in_size) in SHAPES.items():
        if options.int8:
            for num_rows in options.rows:
                compare_int8(name, num_rows, out_size, in_size, options.bandwidth)
            continue
        weights = make_weights(out_size, in_size)
        for num_rows in options.rows:
            if not options.sweep:
                compare(name, num_rows, weights, options.bandwidth)
            elif num_rows <= gemm_w4a16.MAX_ROWS:
                sweep(name, num_rows, weights)


if __name__ == "__main__":
    main()
