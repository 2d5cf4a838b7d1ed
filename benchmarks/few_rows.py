# mypy: allow-untyped-calls
"""Time the linear layers of a dense model for 2 to 16 tokens, one after another in a CUDA graph as in a decode step.

    python benchmarks/few_rows.py [SHAPE ...] [--rows 5 9] [--tilings]

Each linear layer is checked against float64 first. Then it prints µs per layer, medians of 7, over layers whose weights
together exceed the L2 cache: torch's GEMM between Triton's norm and activation, the fused decoder block, and the
kernels for few rows; and the time of each linear layer alone. `--tilings` also times other tilings of each.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch
from gemv import BANDWIDTH, EPS, TOLERANCE, WEIGHT_BYTES, Product, products
from tokenspeed_bench.shapes import SHAPES
from tokenspeed_testing.conformance import poisoned_memory
from torch import Tensor
from torch.nn import functional

from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.activation.gated import silu_mul
from tokenspeed_kernels.triton.fused.fused_block import fused_block
from tokenspeed_kernels.triton.linear.few_rows import Tiling, few_rows_tiling, multiply
from tokenspeed_kernels.triton.norm.rms_norm import sum_rms_norm


class Layers:
    """Decoder layers of one shape with random weights."""

    def __init__(self, shape: str) -> None:
        self.products = qkv, o, gate_up, down = products(shape)
        self.num_bytes = sum(2 * p.rows * p.length for p in self.products)
        self.weights = [
            [random(p.rows, p.length) / p.length**0.5 for p in self.products]
            for _ in range(int(WEIGHT_BYTES / self.num_bytes) + 1)
        ]
        hidden = qkv.length
        self.norm_weight = 1 + random(hidden) / 4
        self.norm = sum_rms_norm({"size": hidden, "dtype": "bfloat16"})
        self.gate = silu_mul({"size": gate_up.out_size, "dtype": "bfloat16"})
        sizes = {"hidden_size": hidden, "intermediate_size": down.length, "max_rows": 64}
        self.block = fused_block(
            {"in_size": o.length, "out_size": qkv.rows, "dtype": "bfloat16", **sizes}
        )

    def few_rows(self, x: Tensor, tilings: list[Tiling], *, pdl: bool = True) -> Tensor:
        """Compute all layers with the kernels for few rows."""
        residual = x
        for weights in self.weights:
            for product, weight, tiling in zip(self.products, weights, tilings, strict=True):
                x = x[:, : product.length]
                if product.normed:
                    x, residual = self.norm(x, residual, self.norm_weight, EPS)
                x = one(product, x, weight, tiling, pdl=pdl)
        return x

    def torchs(self, x: Tensor) -> Tensor:
        """Compute all layers with torch's GEMM."""
        residual = x
        for weights in self.weights:
            for product, weight in zip(self.products, weights, strict=True):
                x = x[:, : product.length]
                if product.normed:
                    x, residual = self.norm(x, residual, self.norm_weight, EPS)
                x = functional.linear(x, weight)
                x = self.gate(x) if product.gated else x
        return x

    def fused(self, x: Tensor) -> Tensor:
        """Compute all layers with the fused decoder block, from one output projection to the next."""
        heads, residual, norm = self.products[1].length, x, self.norm_weight
        x = x.new_ones((x.shape[0], heads))
        for qkv, out, gate_up, down in self.weights:
            x, residual = self.block(
                x[:, :heads], residual, out, norm, gate_up, down, norm, qkv, EPS
            )
        return x


def one(product: Product, x: Tensor, weight: Tensor, tiling: Tiling, *, pdl: bool = True) -> Tensor:
    """Compute one linear layer with the kernel for few rows."""
    y = x.new_empty((x.shape[0], product.out_size))
    multiply(x, weight, None, y, tiling, gated=product.gated, pdl=pdl)
    return y


def default_tiling(product: Product) -> Tiling:
    """Return the tiling that the op chooses."""
    return few_rows_tiling(product.length, gated=product.gated)


def error(product: Product, num_rows: int, tiling: Tiling) -> float:
    """Return the relative error of a linear layer against float64."""
    x = random(num_rows, product.length)
    weight = random(product.rows, product.length) / product.length**0.5
    exact = x.double() @ weight.double().T
    if product.gated:
        exact = functional.silu(exact[:, : product.out_size]) * exact[:, product.out_size :]
    with poisoned_memory():
        found = one(product, x, weight, tiling).double()
    return float((found - exact).norm() / exact.norm())


def timed(call: Callable[[], Tensor], count: int) -> tuple[float, Tensor]:
    """Return the µs of a call in a CUDA graph, divided by `count`, and its result."""
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
        times.append(begin.elapsed_time(end) / count * 1e3)
    return statistics.median(times[1:]), result.clone()


def other_tilings(product: Product) -> Iterator[Tiling]:
    """Yield tilings whose warps have 8 to 32 loads of 16 bytes per thread in flight."""
    for steps, warps in ((2, 8), (4, 4), (4, 8), (8, 4), (8, 8)):
        if steps * warps < (32 if product.gated else 16) or steps * (1 + product.gated) >= 4:
            last = max(0, product.length // (32 * steps * warps) - 1)
            for num_fetched in sorted({0, 1, min(3, last), min(4, last)}):
                yield Tiling(16, steps, warps, num_fetched)


def precompile_tilings(layers: Layers, rows: list[int]) -> None:
    """Compile the other tilings in background threads."""
    blank = partial(precompile.blank, "bfloat16")
    for product in layers.products:
        for tiling in other_tilings(product):
            for num_rows in rows:
                x, weight = blank(num_rows, product.length), blank(product.rows, product.length)
                precompile.compile_for(one, product, x, weight, tiling)


def measure(shape: str, rows: list[int], *, with_tilings: bool) -> None:
    """Check and time one shape."""
    layers = Layers(shape)
    if with_tilings:
        precompile_tilings(layers, rows)
    tilings = [default_tiling(product) for product in layers.products]
    for product, tiling in zip(layers.products, tilings, strict=True):
        for num_rows in (2, 5, 8, 9, 16):
            if not (wrong := error(product, num_rows, tiling)) < TOLERANCE:
                raise SystemExit(
                    f"{shape} {product.name} {num_rows} {tiling}: wrong result, error {wrong}"
                )
    count, hidden = len(layers.weights), layers.products[0].length
    print(f"{shape}: floor {layers.num_bytes / BANDWIDTH * 1e6:.1f} us per layer", flush=True)
    for num_rows in rows:
        x = random(num_rows, hidden)
        torchs, _ = timed(partial(layers.torchs, x), count)
        fused, _ = timed(partial(layers.fused, x), count)
        few, found = timed(partial(layers.few_rows, x, tilings), count)
        _, expected = timed(partial(layers.few_rows, x, tilings, pdl=False), count)
        if not torch.equal(found, expected):
            raise SystemExit(f"{shape} {num_rows}: results with and without PDL differ")
        print(
            f"  {num_rows} rows: torch {torchs:.1f}, fused {fused:.1f}, few {few:.1f}", flush=True
        )
        for index, product in enumerate(layers.products):
            x = random(num_rows, product.length)
            own = [weights[index] for weights in layers.weights]
            few, _ = timed(partial(each, partial(one, product), x, own, tilings[index]), count)
            torchs, _ = timed(partial(each, linear, x, own), count)
            floor = 2e6 * product.rows * product.length / BANDWIDTH
            print(
                f"    {product.name:8} floor {floor:6.2f}, torch {torchs:6.2f}, few {few:6.2f}",
                flush=True,
            )
    if with_tilings:
        measure_tilings(layers, rows, tilings)


def measure_tilings(layers: Layers, rows: list[int], tilings: list[Tiling]) -> None:
    """Time other tilings of each linear layer, and the fastest of all together."""
    count, hidden = len(layers.weights), layers.products[0].length
    for num_rows in rows:
        x, fastest = random(num_rows, hidden), list(tilings)
        for index, product in enumerate(layers.products):
            results = []
            for tiling in other_tilings(product):
                if not (wrong := error(product, num_rows, tiling)) < TOLERANCE:
                    raise SystemExit(f"{product.name} {num_rows} {tiling}: error {wrong}")
                tried = [*tilings[:index], tiling, *tilings[index + 1 :]]
                took, _ = timed(partial(layers.few_rows, x, tried), count)
                results.append((took, tiling))
            results.sort(key=lambda result: result[0])
            fastest[index] = results[0][1]
            print(f"  {num_rows} rows, {product.name}:", flush=True)
            for took, tiling in results:
                print(
                    f"    {took:7.2f}  {tiling.block_n} {tiling.steps} {tiling.num_warps} "
                    f"{tiling.num_fetched}",
                    flush=True,
                )
        took, _ = timed(partial(layers.few_rows, x, fastest), count)
        print(f"  {num_rows} rows, the fastest of each together: {took:.2f} us", flush=True)


def each(
    multiplied: Callable[..., Tensor], x: Tensor, weights: list[Tensor], *others: object
) -> Tensor:
    """Multiply x by each of the weights; return the last result."""
    for weight in weights:
        y = multiplied(x, weight, *others)
    return y


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Call torch's GEMM."""
    return functional.linear(x, weight)


def measure_head(shape: str, rows: list[int]) -> None:
    """Check and time the output head."""
    config = SHAPES[shape]
    head = Product("head", config["vocab_size"], config["hidden_size"])
    weight = random(head.rows, head.length) / head.length**0.5
    for num_rows in rows:
        if not (wrong := error(head, num_rows, default_tiling(head))) < TOLERANCE:
            raise SystemExit(f"{shape} head {num_rows}: wrong result, error {wrong}")
        x, own = random(num_rows, head.length), [weight] * 2
        few, _ = timed(partial(each, partial(one, head), x, own, default_tiling(head)), 2)
        torchs, _ = timed(partial(each, linear, x, own), 2)
        floor = 2e6 * head.rows * head.length / BANDWIDTH
        print(
            f"  {num_rows} rows, head: floor {floor:.1f}, torch {torchs:.1f}, few {few:.1f}",
            flush=True,
        )


def main() -> None:
    """Time the chosen shapes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("shapes", nargs="*", default=["qwen3-8b", "qwen3-0.6b"])
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 5, 9, 16])
    parser.add_argument("--tilings", action="store_true")
    options = parser.parse_args()
    for shape in options.shapes:
        measure(shape, options.rows, with_tilings=options.tilings)
        measure_head(shape, options.rows)


def random(*shape: int) -> Tensor:
    """Return normally distributed numbers."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


if __name__ == "__main__":
    main()
