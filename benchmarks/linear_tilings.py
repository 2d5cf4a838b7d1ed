"""Find the best tilings of the Triton linear kernels on this GPU, checked against float64, beside torch's product.

    python benchmarks/linear_tilings.py [--seconds 150]

Each shape is timed inside a CUDA graph over copies of its weight that exceed the cache together: medians of 7.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from tokenspeed_kernels.triton.linear import Tiling, multiply, one_row_tiling, some_rows_tiling

SHAPES = {  # name: (out, in)
    "8b qkv": (6144, 4096), "8b o": (4096, 4096), "8b gate_up": (24576, 4096), "8b down": (4096, 12288),
    "8b head": (151936, 4096), "0.6b qkv": (4096, 1024), "0.6b o": (1024, 2048), "0.6b gate_up": (6144, 1024),
    "0.6b down": (1024, 3072), "30b qkv": (5120, 2048), "30b o": (2048, 4096),
}
COLD_BYTES = 600_000_000   # of weight copies, ten times the cache
TOLERANCE = 6e-3           # relative, of bfloat16 results


def micros(call: Callable[[Tensor], Tensor], weights: Sequence[Tensor]) -> float:
    """Return the microseconds of one call, launched from a graph over all weights."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for weight in weights[:2]:
            call(weight)
        with torch.cuda.graph(graph, stream=stream):
            for weight in weights:
                call(weight)
    times = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / len(weights) * 1e3)
    return statistics.median(times)


def candidates(in_size: int, *, one_row: bool) -> Iterator[Tiling]:
    """Yield the tilings to try."""
    if one_row:
        for block_n in (1, 2, 4, 8):
            for block_k in (512, 1024, 2048):
                yield from (Tiling(block_n, block_k, num_warps, 1) for num_warps in (2, 4) if block_k <= 2 * in_size)
        return
    for block_n in (16, 32, 64):
        for block_k in (64, 128, 256):
            for num_stages in (3, 4, 6):
                if (block_n + 16) * block_k * num_stages * 2 < 200_000:
                    yield Tiling(block_n, block_k, 4, num_stages)


def main() -> None:
    """Sweep until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=150)
    until = time.monotonic() + parser.parse_args().seconds
    for name, (out_size, in_size) in SHAPES.items():
        num_bytes = 2 * out_size * in_size
        weights = [
            torch.randn(out_size, in_size, device="cuda", dtype=torch.bfloat16) / in_size**0.5
            for _ in range(2 + COLD_BYTES // num_bytes)
        ]
        for num_rows in (1, 4, 16):
            if time.monotonic() > until:
                return
            x = torch.randn(num_rows, in_size, device="cuda", dtype=torch.bfloat16)
            exact = x.double() @ weights[0].double().T
            found: list[tuple[float, bool, Tiling]] = []
            for one_row in (True, False) if num_rows == 1 else (False,):
                for tiling in candidates(in_size, one_row=one_row):
                    got = multiply(x, weights[0], None, tiling, one_row=one_row)
                    error = float((got.double() - exact).norm() / exact.norm())
                    if not error < TOLERANCE:
                        raise SystemExit(f"{name}, {num_rows} rows, {tiling}: wrong by {error}")
                    took = micros(lambda w: multiply(x, w, None, tiling, one_row=one_row), weights)  # noqa: B023
                    found.append((took, one_row, tiling))
            found.sort(key=lambda each: each[0])
            one = one_row_tiling(out_size, in_size) if num_rows == 1 else None
            chosen = (one is not None, one or some_rows_tiling(out_size, in_size))
            ours = next((took for took, *how in found if tuple(how) == chosen), float("nan"))
            torchs = micros(lambda w: functional.linear(x, w), weights)  # noqa: B023
            print(
                f"{name:12} {num_rows:2} rows: torch {torchs:6.1f} us, chosen {ours:6.1f}, best {found[0][0]:6.1f} "
                f"({num_bytes / found[0][0] / 1e6:.2f} TB/s) {found[0][2]}", flush=True,
            )


if __name__ == "__main__":
    main()
