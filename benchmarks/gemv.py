# mypy: allow-untyped-calls
"""Time the linear layers of a dense model for one token, one after another in a CUDA graph as in a decode step.

    python benchmarks/gemv.py [SHAPE ...] [--tilings]

Prints µs per layer, medians of 7, over layers whose weights together exceed the L2 cache: torch's GEMM between Triton's
norm and activation, our GEMV kernels without PDL, and with PDL. Both of ours must agree bitwise, and each linear layer
is checked against float64 first. `--tilings` also times other tilings of each.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from tokenspeed_bench.shapes import SHAPES
from tokenspeed_testing.conformance import poisoned_memory
from torch import Tensor

from tokenspeed_kernels.triton.linear.gemm import add_rms_norm_linear, add_rms_norm_linear_silu_mul
from tokenspeed_kernels.triton.linear.gemv import Before, Tiling, multiply, one_row_tiling

EPS = 1e-6
TOLERANCE = 6e-3  # relative error of bfloat16 results
WEIGHT_BYTES = 2e9  # of all layers together, many times the L2 cache
BANDWIDTH = 4.5e12  # bytes read per second


@dataclass(frozen=True, slots=True)
class Product:
    """A linear layer: rows and length of its weight, and whether RMS norm or SwiGLU is fused into it."""

    name: str
    rows: int
    length: int
    normed: bool = False
    gated: bool = False

    @property
    def out_size(self) -> int:
        """Output features."""
        return self.rows // 2 if self.gated else self.rows


def products(shape: str) -> tuple[Product, ...]:
    """Return the linear layers of a decoder layer in order.

    The input of o is a slice of qkv instead of attention's output.
    """
    config = SHAPES[shape]
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    return (
        Product("qkv", (heads + 2 * kv_heads) * head, hidden, normed=True),
        Product("o", hidden, heads * head),
        Product("gate_up", 2 * inner, hidden, normed=True, gated=True),
        Product("down", hidden, inner),
    )


class Layers:
    """Decoder layers of one shape with random weights, and an input token."""

    def __init__(self, shape: str) -> None:
        self.products = products(shape)
        self.num_bytes = sum(2 * p.rows * p.length for p in self.products)
        self.weights = [
            [_random(p.rows, p.length) / p.length**0.5 for p in self.products]
            for _ in range(int(WEIGHT_BYTES / self.num_bytes) + 1)
        ]
        self.norm = 1 + _random(self.products[0].length) / 4
        self.x = _random(1, self.products[0].length)

    def ours(self, tilings: list[Tiling], pdl: bool) -> Tensor:
        """Compute all layers with our kernels."""
        x = residual = self.x
        for weights in self.weights:
            for product, weight, tiling in zip(self.products, weights, tilings, strict=True):
                x, residual = one(product, x, residual, weight, self.norm, tiling, pdl)
        return x

    def torchs(self) -> Tensor:
        """Compute all layers with torch's GEMM."""
        x = residual = self.x
        parts = [
            (add_rms_norm_linear_silu_mul if p.gated else add_rms_norm_linear)(
                {"in_size": p.length, "out_size": p.out_size, "dtype": "bfloat16"}
            )
            for p in self.products
        ]
        for weights in self.weights:
            for product, weight, part in zip(self.products, weights, parts, strict=True):
                x = x[:, : product.length]
                if product.normed:
                    x, residual = part(x, residual, self.norm, EPS, weight, None)
                else:
                    x = torch.nn.functional.linear(x, weight)
        return x


def one(
    product: Product,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    norm: Tensor,
    tiling: Tiling,
    pdl: bool,
) -> tuple[Tensor, Tensor]:
    """Compute one linear layer with our kernel; return its result and the residual."""
    x = x[:, : product.length]
    y = x.new_empty((1, product.out_size))
    before = Before(residual, torch.empty_like(x), norm, EPS) if product.normed else None
    multiply(x, weight, None, y, tiling, before=before, gated=product.gated, pdl=pdl)
    return y, residual if before is None else before.total


def error(product: Product, tiling: Tiling) -> float:
    """Return the relative error of a linear layer against float64."""
    x, residual, weight = (
        _random(1, product.length),
        _random(1, product.length),
        _random(product.rows, product.length),
    )
    norm = 1 + _random(product.length) / 4
    weight /= product.length**0.5
    exact = x.double()
    if product.normed:
        exact = (x + residual).double()
        exact = exact * torch.rsqrt(exact.square().mean() + EPS) * norm.double()
    exact = exact @ weight.double().T
    if product.gated:
        exact = (
            torch.nn.functional.silu(exact[:, : product.out_size]) * exact[:, product.out_size :]
        )
    with poisoned_memory():
        found = one(product, x, residual, weight, norm, tiling, True)[0].double()
    return float((found - exact).norm() / exact.norm())


def timed(layers: Layers, call: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """Return the µs per layer in a CUDA graph, and the result."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            result = call()
    times = []
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / len(layers.weights) * 1e3)
    return statistics.median(times[1:]), result.clone()


def other_tilings(product: Product) -> Iterator[Tiling]:
    """Yield tilings with 32 to 128 elements per thread."""
    length = 1 << (product.length - 1).bit_length()
    for block_n in (1, 2, 4, 8):
        for num_warps in (1, 2, 4, 8):
            if 32 <= block_n * length * (2 if product.gated else 1) // (32 * num_warps) <= 128:
                yield Tiling(block_n, num_warps)


def measure(shape: str, *, with_tilings: bool) -> None:
    """Check and time one shape."""
    layers = Layers(shape)
    tilings = [one_row_tiling(p.length, gated=p.gated) for p in layers.products]
    for product, tiling in zip(layers.products, tilings, strict=True):
        if not (wrong := error(product, tiling)) < TOLERANCE:
            raise SystemExit(f"{shape} {product.name} {tiling}: wrong result, error {wrong}")
    torchs, _ = timed(layers, layers.torchs)
    after, expected = timed(layers, lambda: layers.ours(tilings, False))
    with_pdl, found = timed(layers, lambda: layers.ours(tilings, True))
    if not torch.equal(found, expected):
        raise SystemExit(f"{shape}: results with and without PDL differ")
    floor = layers.num_bytes / BANDWIDTH * 1e6
    print(
        f"{shape}: floor {floor:.1f}, torch {torchs:.1f}, ours {after:.1f}, with PDL {with_pdl:.1f}",
        flush=True,
    )
    for index, product in enumerate(layers.products if with_tilings else ()):
        for tiling in other_tilings(product):
            tried = [*tilings[:index], tiling, *tilings[index + 1 :]]
            took, _ = timed(layers, lambda: layers.ours(tried, True))  # noqa: B023
            print(
                f"  {product.name} {tiling}: {took:.2f}, wrong by {error(product, tiling):.4f}",
                flush=True,
            )


def main() -> None:
    """Time the chosen shapes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "shapes", nargs="*", default=["qwen3-0.6b", "qwen3-8b"], help="shapes of models"
    )
    parser.add_argument("--tilings", action="store_true", help="also time other tilings")
    options = parser.parse_args()
    for shape in options.shapes:
        measure(shape, with_tilings=options.tilings)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


if __name__ == "__main__":
    main()
