# mypy: allow-untyped-calls
"""Time tilings of the two GEMMs of routed experts in bfloat16, PyTorch's grouped GEMM, and the lower bound.

    python benchmarks/moe_tilings.py [--model qwen3-30b-a3b] [--tokens 16 64 256 8192] [--top 3] [--json FILE]

Needs a CUDA device. Tokens choose random experts. A CUDA graph holds a few layers, each with separate weights. Every
tiling is compared with the reference first. Times are µs per layer, medians of 15. The floor is the longer of reading
each used expert once at 4.5 TB/s and of computing the products at 800 TFLOP/s. `grouped_mm` multiplies rows that are
already sorted by expert, without the activation.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from moe_decode import MODELS
from torch import Tensor

from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.moe.experts import (
    Gemm,
    Tiling,
    new_tiles,
    run_down,
    run_gate_up,
    sort_by_expert,
    tiling_for,
)

BANDWIDTH, PEAK = 4.5e12, 800e12
SHARED_MEMORY = 227 * 1024  # bytes per multiprocessor
Weights = tuple[Tensor, Tensor]  # gate and up [E, 2I, N], down [E, N, I]


def gemms(block_m: int, num_weights: int) -> Iterator[Gemm]:
    """Yield the GEMMs to time, for tiles with one weight (down) or two (gate and up)."""
    few = block_m <= 32
    for columns, block_k, num_warps, num_stages in itertools.product(
        (32, 64, 128) if few else (64, 128, 256), (64, 128), (4, 8), (3, 5) if few else (3, 4)
    ):
        num_bytes = 2 * block_k * (block_m + num_weights * columns) * num_stages
        values = num_weights * block_m * columns // (32 * num_warps)  # of a thread
        if num_bytes > SHARED_MEMORY or not (few or values >= 32) or values > 128:
            continue
        yield Gemm(columns, block_k, num_warps, num_stages)
        if few and columns >= 64:
            yield Gemm(columns, block_k, num_warps, num_stages, weights_first=True)


def timed(run: Callable[[int], object], num_layers: int) -> float:
    """Return the µs of a layer."""
    for layer in range(num_layers):
        run(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(num_layers):
            run(layer)
    times = []
    for _ in range(15):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / num_layers)
    return float(statistics.median(times))


class Case:
    """A step's routed tokens, with the expected results in float32 of the bfloat16 operands."""

    def __init__(self, model: dict[str, Any], num_tokens: int, layers: list[Weights]) -> None:
        """Route the tokens at random."""
        self.layers, self.top_k, self.num_experts = layers, model["top_k"], model["num_experts"]
        shape = num_tokens, self.num_experts
        ids = torch.rand(shape, device="cuda").argsort(dim=1)[:, : self.top_k]
        self.ids = ids.to(torch.int32).contiguous()
        self.weights = torch.rand(self.ids.shape, device="cuda")
        self.x = torch.randn(num_tokens, model["hidden_size"], device="cuda").bfloat16()
        self.pairs, self.counts = sort_by_expert(self.ids, self.num_experts)
        self.inner, self.size = model["intermediate_size"], model["hidden_size"]
        self.hidden = self.gate_up(tiling_for(len(self.pairs) / self.num_experts), 0)

    def tiles(self, tiling: Tiling) -> Tensor:
        """Return the tiles of the sorted pairs, which are those of every sort up to their order within an expert."""
        tiles = new_tiles(self.ids, self.num_experts, tiling.block_m)
        sort_by_expert(self.ids, self.num_experts, tiles, tiling.block_m)
        return tiles

    def gate_up(self, tiling: Tiling, layer: int, tiles: Tensor | None = None) -> Tensor:
        """Run the first GEMM."""
        if tiles is None:
            tiles = self.tiles(tiling)
        return run_gate_up(tiling, self.x, self.layers[layer][0], self.pairs, tiles, self.top_k)

    def down(self, tiling: Tiling, layer: int, tiles: Tensor | None = None) -> Tensor:
        """Run the second GEMM."""
        if tiles is None:
            tiles = self.tiles(tiling)
        down = self.layers[layer][1]
        return run_down(tiling, self.hidden, down, self.pairs, tiles, self.weights)

    def check(self) -> dict[str, Tensor]:
        """Compare the chosen tiling with PyTorch, expert by expert, and return its results."""
        ours = tiling_for(len(self.pairs) / self.num_experts)
        found = {"gate_up": self.hidden, "down": self.down(ours, 0)}
        ends = self.counts.cumsum(0).tolist()
        for expert, (end, count) in enumerate(zip(ends, self.counts.tolist(), strict=True)):
            pairs = self.pairs[end - count : end].long()
            gate_up, down = (each[expert].float() for each in self.layers[0])
            both = self.x[pairs // self.top_k].float() @ gate_up.T
            gate, up = both.chunk(2, dim=1)
            agree(found["gate_up"][end - count : end], torch.nn.functional.silu(gate) * up)
            y = self.hidden[end - count : end].float() @ down.T
            agree(found["down"][pairs], y * self.weights.view(-1)[pairs].unsqueeze(1))
        return found

    def floor(self, name: str) -> float:
        """Return the µs that a GEMM takes at least."""
        used = int((self.counts > 0).sum())
        elements = self.size * self.inner * (2 if name == "gate_up" else 1)
        num_bytes, operations = 2 * used * elements, 2 * len(self.pairs) * elements
        return float(max(num_bytes / BANDWIDTH, operations / PEAK) * 1e6)


def agree(found: Tensor, expected: Tensor) -> None:
    """Exit if a result is wrong."""
    error = float((found.float() - expected).norm() / expected.norm().clamp(min=1e-6))
    if not error < 1e-2:
        raise SystemExit(f"wrong result: relative error {error:.2e}")


def sweep(case: Case, name: str, found: dict[str, Tensor]) -> list[tuple[float, int, Gemm]]:
    """Return the times of all tilings of a GEMM, the best first."""
    average = len(case.pairs) / case.num_experts
    num_weights = 2 if name == "gate_up" else 1
    call = case.gate_up if name == "gate_up" else case.down
    blocks = [
        each for each in (16, 32, 64, 128) if min(128, average / 4) <= each <= max(32, average * 3)
    ]
    ours = tiling_for(average)
    tilings = [ours]
    for block_m in blocks:
        for gemm in gemms(block_m, num_weights):
            tilings.append(replace(ours, block_m=block_m, up=gemm, down=gemm))
    # Compile in background threads.
    for tiling in tilings:
        precompile.compile_for(call, tiling, 0)
    times = []
    for tiling in tilings:
        gemm = tiling.up if name == "gate_up" else tiling.down
        try:
            tiles = case.tiles(tiling)
            agree(call(tiling, 0, tiles), found[name].float())
            took = timed(lambda layer, t=tiling, of=tiles: call(t, layer, of), len(case.layers))  # type: ignore[misc]
        except (RuntimeError, torch.AcceleratorError) as error:
            print(f"  {tiling.block_m} {gemm}: {str(error).splitlines()[0][:80]}")
            continue
        except Exception as error:  # Triton's own: too much shared memory
            if type(error).__name__ != "OutOfResources":
                raise
            continue
        times.append((took, tiling.block_m, gemm))
    first = times[0]
    times.sort(key=lambda each: each[0])
    return [first, *times]


def grouped_mm(case: Case, name: str) -> float:
    """Return the µs of PyTorch's grouped GEMM for sorted rows."""
    ends = case.counts.cumsum(0).to(torch.int32)
    x = case.x[case.pairs.long() // case.top_k] if name == "gate_up" else case.hidden
    at = 0 if name == "gate_up" else 1
    return timed(
        lambda layer: torch._grouped_mm(x, case.layers[layer][at].transpose(1, 2), offs=ends),
        len(case.layers),
    )


def text_of(took: float, block_m: int, gemm: Gemm) -> str:
    """Describe a tiling."""
    order = ", weights first" if gemm.weights_first else ""
    return (
        f"{took:.1f} ({block_m}x{gemm.columns}x{gemm.block_k}, {gemm.num_warps} warps, "
        f"{gemm.num_stages} stages{order})"
    )


def main() -> None:
    """Print a line for each number of tokens and GEMM."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="qwen3-30b-a3b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 64, 256, 8192])
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--top", type=int, default=3, help="tilings to print")
    parser.add_argument("--json", type=Path, help="write all times to this file")
    options = parser.parse_args()
    model = MODELS[options.model]
    num_experts, size, inner = (
        model[name] for name in ("num_experts", "hidden_size", "intermediate_size")
    )

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda").mul_(shape[-1] ** -0.5)

    layers = [
        (random(num_experts, 2 * inner, size), random(num_experts, size, inner))
        for _ in range(options.layers)
    ]
    rows = []
    for num_tokens in options.tokens:
        case = Case(model, num_tokens, layers)
        found = case.check()
        for name in ("gate_up", "down"):
            ours, *best = sweep(case, name, found)
            library, floor = grouped_mm(case, name), case.floor(name)
            print(
                f"{options.model} {num_tokens} tokens, {name}: floor {floor:.1f}, chosen {text_of(*ours)}, "
                f"grouped_mm {library:.1f}; best {'; '.join(text_of(*each) for each in best[: options.top])}",
                flush=True,
            )
            rows += [
                {"tokens": num_tokens, "gemm": name, "us": took, "block_m": block_m, **asdict(gemm)}
                for took, block_m, gemm in best
            ]
    if options.json:
        options.json.write_text(json.dumps({"model": options.model, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
