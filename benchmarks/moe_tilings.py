# mypy: allow-untyped-calls
"""Time tilings of the two GEMMs of routed experts, PyTorch's grouped GEMM, and the lower bound.

    python benchmarks/moe_tilings.py [--ops bf16] [--models qwen3-30b-a3b] [--tokens 16 64 256 8192] [--json FILE]
    python benchmarks/moe_tilings.py --ops fp8 int8 fp8_block --tokens 8192 1024 256
    python benchmarks/moe_tilings.py --ops fp8 --tokens 8192 1024 --models qwen3-30b-a3b deepseek-v2-lite
    python benchmarks/moe_tilings.py --ops w4a16 mxfp4 biased biased-mxfp4 --out tokenspeed_kernels/triton/moe/tuned.json

Needs a CUDA device. Tokens choose random experts. Models of less than 2 GB per layer are timed in a CUDA graph of a few
layers, each with separate weights. Every tiling is compared with float32 first. Times are µs per layer, medians of 15.
The floor is the longer of reading each used expert once and of computing the products, at the rates of --bandwidth and
--peak. `grouped_mm` multiplies bfloat16 rows that are already sorted by expert, without the activation.

For bfloat16, all tilings that fit are timed; for 8 bits, a few (`CANDIDATES`), with a line each that has its error. An
error is the root mean square over all outputs of the difference from float32 results of the same codes and scales,
relative to the error that the quantization of the inputs causes. It includes the rounding of outputs to bfloat16. Both
GEMMs share the pairs per tile, so the last lines give the best two GEMMs with the same pairs per tile for each op,
model and number of tokens.

INT4 and MXFP4 experts (w4a16, mxfp4) and experts with biases (biased, biased-mxfp4) are timed as whole ops, with a
flushed L2 cache.

`--out` writes the best tilings for this compute capability, which kernels read when they are made. A tiling covers a
range of pairs per expert; ranges that were not timed keep their tiling. Tilings with an error more than 2 % larger than
that of the one in use are left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from moe_whole_tilings import WHOLE_OPS
from moe_whole_tilings import sweep as sweep_whole
from rank_kernels import COMMON, SHAPES
from tiling_file import tuned_table, update
from torch import Tensor

from tokenspeed_core.kernels.installed import installed_ops
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.moe.experts import (
    new_tiles,
    run_down,
    run_gate_up,
    sort_by_expert,
)
from tokenspeed_kernels.triton.moe.scales import Scales
from tokenspeed_kernels.triton.moe.tilings import Gemm, Tiling, Tilings, tiling_for
from tokenspeed_kernels.triton.moe.tuned import tuned_tilings
from tokenspeed_kernels.triton.quantize.fp8_per_group import GROUP, quantize_fp8_groups
from tokenspeed_kernels.triton.quantize.fp8_per_token import quantize_fp8
from tokenspeed_kernels.triton.quantize.integer import quantize_int8

SHARED_MEMORY = 227 * 1024  # bytes per multiprocessor
LAYER_BYTES = 2_000_000_000  # of a layer that is timed alone
NAMES = ("gate_up", "down")
MAX_INEXACT = 128  # products summed in the tensor cores' short accumulator before a float32 sum
MAX_ERROR = 1.02  # of a tiling that `--out` writes, relative to the tiling in use


@dataclass(frozen=True, slots=True)
class Op:
    """An op and the models to time by default; for 8 bits, the kind of scales and the function that quantizes inputs."""

    name: str
    models: tuple[str, ...]
    dtype: torch.dtype = torch.bfloat16
    kind: str = "none"
    quantize: Callable[..., Any] | None = None

    @property
    def tilings(self) -> Tilings:
        """The tilings in use on this device."""
        return tuned_tilings(self.name, Tiling.of)


OPS = {
    "bf16": Op("moe_experts", COMMON[:1]),
    "fp8": Op("moe_experts_fp8", COMMON, torch.float8_e4m3fn, "channel", quantize_fp8),
    "int8": Op("moe_experts_int8", COMMON, torch.int8, "channel", quantize_int8),
    "fp8_block": Op(
        "moe_experts_fp8_block",
        (*COMMON, "deepseek-v3"),
        torch.float8_e4m3fn,
        "block",
        quantize_fp8_groups,
    ),
}


def _wide(
    columns: int, num_warps: int, num_stages: int, *, joined: bool = False, together: int = 8
) -> Gemm:
    """Return a GEMM with the pairs as the left operand."""
    return Gemm(columns, GROUP, num_warps, num_stages, joined=joined, together=together)


def _precise(columns: int, num_warps: int, num_stages: int, *, joined: bool = False) -> Gemm:
    """Return a GEMM of FP8 that adds up few products in the short accumulator."""
    gemm = _wide(columns, num_warps, num_stages, joined=joined)
    return replace(gemm, max_inexact=MAX_INEXACT)


def _narrow(columns: int, num_warps: int, num_stages: int) -> Gemm:
    """Return a GEMM with the weights as the left operand."""
    return Gemm(columns, GROUP, num_warps, num_stages, weights_first=True)


FEW = tuple(
    (block_m, gemm)
    for block_m in (16, 32)
    for gemm in (_narrow(64, 4, 4), _narrow(64, 4, 6), _narrow(128, 4, 4))
)
# (largest average of pairs per expert, pairs per tile and GEMM), by kind of scales and GEMM. Compiled for compute
# capability 9.0, they spill no registers, except where a comment says so.
CANDIDATES: dict[tuple[str, str], tuple[tuple[float, tuple[tuple[int, Gemm], ...]], ...]] = {
    ("channel", "gate_up"): (
        (32.0, FEW),
        (
            128.0,
            (
                (64, _narrow(64, 4, 4)),
                (64, _wide(64, 4, 4, joined=True)),
                (64, _wide(128, 4, 3, joined=True)),
                (128, _wide(64, 8, 3, joined=True)),
                (64, _precise(64, 4, 4, joined=True)),
                (128, _precise(64, 8, 3, joined=True)),
            ),
        ),
        (
            float("inf"),
            (
                (128, _wide(128, 8, 3, joined=True)),
                (128, _wide(128, 8, 3, joined=True, together=1)),
                (128, _wide(128, 8, 4, joined=True)),
                (128, _wide(64, 8, 3, joined=True)),  # two programs per multiprocessor
                (128, _wide(128, 8, 3)),
                (128, _narrow(128, 8, 3)),
                (64, _wide(128, 4, 3, joined=True)),
                (128, _precise(128, 8, 3, joined=True)),  # spills 51 registers
                (128, _precise(64, 8, 3, joined=True)),
            ),
        ),
    ),
    ("channel", "down"): (
        (32.0, FEW),
        (
            128.0,
            (
                (64, _narrow(128, 4, 4)),
                (64, _wide(128, 4, 4)),
                (64, _wide(256, 8, 3)),
                (128, _wide(128, 8, 3)),
                (64, _precise(128, 4, 4)),
                (128, _precise(128, 8, 3)),
            ),
        ),
        (
            float("inf"),
            (
                (128, _wide(128, 8, 3)),  # two programs per multiprocessor
                (128, _wide(128, 8, 3, together=1)),
                (128, _wide(128, 4, 3)),
                (128, _wide(256, 8, 3)),
                (128, _wide(256, 8, 4)),
                (128, _narrow(128, 8, 3)),
                (64, _wide(128, 4, 4)),
                (128, _precise(128, 8, 3)),
            ),
        ),
    ),
    ("block", "gate_up"): (
        (32.0, FEW),
        (
            128.0,
            (
                (64, _wide(64, 4, 4, joined=True)),
                (64, _wide(64, 4, 3, joined=True)),
                (128, _wide(64, 8, 3, joined=True)),
            ),
        ),
        (
            float("inf"),
            (
                (128, _wide(64, 8, 4, joined=True)),
                (128, _wide(64, 8, 4, joined=True, together=1)),
                (128, _wide(64, 8, 3)),
                (128, _wide(128, 8, 3)),  # spills 9 registers
                (64, _wide(64, 4, 4, joined=True)),
                (64, _wide(64, 4, 3, joined=True)),
                (64, _wide(128, 8, 3, joined=True)),
            ),
        ),
    ),
    ("block", "down"): (
        (32.0, FEW),
        (
            128.0,
            (
                (64, _wide(128, 4, 4)),
                (64, _wide(128, 4, 3)),
                (128, _wide(128, 8, 3)),
            ),
        ),
        (
            float("inf"),
            (
                (128, _wide(128, 8, 3)),
                (128, _wide(128, 8, 4)),
                (128, _wide(128, 8, 4, together=1)),
                (64, _wide(128, 4, 4)),
                (64, _wide(128, 4, 3)),
            ),
        ),
    ),
}


def gemms(block_m: int, num_weights: int) -> Iterator[Gemm]:
    """Yield the GEMMs of bfloat16 to time, for tiles with one weight (down) or two (gate and up)."""
    few = block_m <= 32
    for columns, block_k, num_warps, num_stages in itertools.product(
        (32, 64, 128) if few else (64, 128, 256), (64, 128), (4, 8), (3, 5) if few else (3, 4)
    ):
        num_bytes = 2 * block_k * (block_m + num_weights * columns) * num_stages
        values = num_weights * block_m * columns // (32 * num_warps)  # of a thread
        if num_bytes > SHARED_MEMORY or not (few or values >= 32) or values > 128:
            continue
        gemm = Gemm(columns, block_k, num_warps, num_stages)
        yield gemm
        if few and columns >= 64:
            yield replace(gemm, weights_first=True)
        if not few:
            yield replace(gemm, together=8)
        if num_weights == 2 and not few:
            yield replace(gemm, joined=True)
            yield replace(gemm, joined=True, together=8)
        if block_m == 128 and columns >= 128:
            yield replace(gemm, joined=num_weights == 2, tma=True, together=4)
            yield replace(gemm, joined=num_weights == 2, tma=True, together=16)


def tilings_of(op: Op, name: str, average: float) -> list[Tiling]:
    """Return the tilings of a GEMM to time, the one in use first."""
    ours = tiling_for(average, op.tilings)
    num_weights = 2 if name == "gate_up" else 1
    if op.kind == "none":
        low, high = min(128, average / 4), max(32, average * 3)
        blocks = [each for each in (16, 32, 64, 128) if low <= each <= high]
        found = [(block, gemm) for block in blocks for gemm in gemms(block, num_weights)]
    else:
        bounds = CANDIDATES[op.kind, name]
        candidates = next(each for bound, each in bounds if average <= bound)
        is_fp8 = op.dtype == torch.float8_e4m3fn
        found = [each for each in candidates if is_fp8 or each[1].max_inexact is None]
    return [
        ours,
        *(Tiling(block, gemm, gemm, _has_halves(op, block, gemm)) for block, gemm in found),
    ]


def _has_halves(op: Op, block_m: int, gemm: Gemm) -> bool:
    """Return whether to compute halves of tiles. For 8 bits, those of 16 pairs were measured as the right operand."""
    return block_m >= (32 if op.kind == "none" or gemm.weights_first else 128)


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


class Weight:
    """A random weight [E, N, K], with scales if it has 8 bits."""

    def __init__(self, op: Op, num_experts: int, num_rows: int, size: int) -> None:
        """Make it expert by expert, because a float32 copy of all would not fit."""
        self.kind = op.kind
        self.codes = torch.empty((num_experts, num_rows, size), dtype=op.dtype, device="cuda")
        for codes in self.codes:
            if op.dtype == torch.int8:
                codes.random_(-127, 128)
            else:
                codes.copy_(torch.randn(num_rows, size, device="cuda").mul_(size**-0.5))
        shape = num_rows, 1
        if op.kind == "block":
            shape = -(-num_rows // GROUP), -(-size // GROUP)
        self.scale = torch.rand((num_experts, *shape), device="cuda").add_(0.5)
        if op.dtype == torch.int8:
            self.scale.mul_(size**-0.5 / 64)

    def expert(self, expert: int) -> Tensor:
        """Return an expert's weight in float32."""
        return dequantized(self.codes[expert], self.scale[expert], self.kind)


def dequantized(codes: Tensor, scale: Tensor, kind: str) -> Tensor:
    """Return float32 values of codes [N, K] with scales for each row, for each block, or for each group of a row."""
    if kind == "none":
        return codes.float()
    if kind == "block":
        rows, size = codes.shape
        scale = scale.repeat_interleave(GROUP, dim=1)[:, :size]
        if len(scale) != rows:
            scale = scale.repeat_interleave(GROUP, dim=0)[:rows]
    return codes.float() * scale


@dataclass(frozen=True, slots=True)
class Expected:
    """The float32 results of a GEMM, and the root mean square of the error that quantized inputs cause (0: none)."""

    values: Tensor
    quantization_error: float


@dataclass(frozen=True, slots=True)
class Timing:
    """The µs of a tiling, and its error relative to the one of quantization, or None without quantization."""

    us: float
    block_m: int
    gemm: Gemm
    error: float | None
    halves: bool


class Case:
    """A step's routed tokens."""

    def __init__(
        self, op: Op, model: dict[str, Any], num_tokens: int, layers: list[tuple[Weight, Weight]]
    ) -> None:
        """Route the tokens at random."""
        self.op, self.layers, self.top_k = op, layers, model["top_k"]
        self.num_experts = model["num_experts"]
        self.inner, self.size = model["intermediate_size"], model["hidden_size"]
        shape = num_tokens, self.num_experts
        ids = torch.rand(shape, device="cuda").argsort(dim=1)[:, : self.top_k]
        self.ids = ids.to(torch.int32).contiguous()
        self.weights = torch.rand(self.ids.shape, device="cuda")
        self.tokens = torch.randn(num_tokens, self.size, device="cuda").bfloat16()
        self.x, self.x_scale = self.quantized(self.tokens)
        self.pairs, self.counts = sort_by_expert(self.ids, self.num_experts)
        self.average = self.ids.numel() / self.num_experts
        self.ours = tiling_for(self.average, op.tilings)
        self.activated = self.gate_up(self.ours, 0)
        self.hidden, self.hidden_scale = self.quantized(self.activated)

    def quantized(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the inputs of a GEMM and their scales."""
        if self.op.quantize is None:
            return x, None
        found: tuple[Tensor, Tensor] = self.op.quantize({"size": x.shape[1], "dtype": "bfloat16"})(
            x
        )
        return found

    def scales(self, inputs: Tensor | None, weight: Weight) -> Scales | None:
        """Return the scales of a GEMM."""
        if inputs is None:
            return None
        return Scales(self.op.kind, inputs, weight.scale, torch.bfloat16)

    def tiles(self, tiling: Tiling) -> Tensor:
        """Return the tiles of the sorted pairs, which are those of every sort up to their order within an expert."""
        tiles = new_tiles(self.ids, self.num_experts, tiling.block_m)
        sort_by_expert(self.ids, self.num_experts, tiles, tiling.block_m)
        return tiles

    def gate_up(self, tiling: Tiling, layer: int, tiles: Tensor | None = None) -> Tensor:
        """Run the first GEMM."""
        if tiles is None:
            tiles = self.tiles(tiling)
        weight = self.layers[layer][0]
        scales = self.scales(self.x_scale, weight)
        return run_gate_up(
            tiling, self.x, weight.codes, self.pairs, tiles, self.top_k, scales=scales
        )

    def down(self, tiling: Tiling, layer: int, tiles: Tensor | None = None) -> Tensor:
        """Run the second GEMM."""
        if tiles is None:
            tiles = self.tiles(tiling)
        weight = self.layers[layer][1]
        scales = self.scales(self.hidden_scale, weight)
        return run_down(
            tiling, self.hidden, weight.codes, self.pairs, tiles, self.weights, scales=scales
        )

    def expected(self) -> dict[str, Expected]:
        """Compute both GEMMs in float32 with PyTorch, expert by expert."""
        shapes = self.activated.shape, (len(self.pairs), self.size)
        results = [torch.zeros(shape, device="cuda") for shape in shapes]
        errors = [torch.zeros((), device="cuda", dtype=torch.float64) for _ in shapes]
        ends = self.counts.cumsum(0).tolist()
        for expert, (end, count) in enumerate(zip(ends, self.counts.tolist(), strict=True)):
            pairs, run = self.pairs[end - count : end].long(), slice(end - count, end)
            gate_up, down = (each.expert(expert) for each in self.layers[0])
            tokens, weights = pairs // self.top_k, self.weights.view(-1)[pairs].unsqueeze(1)

            def activate(x: Tensor, weight: Tensor = gate_up) -> Tensor:
                gate, up = (x @ weight.T).chunk(2, dim=1)
                return torch.nn.functional.silu(gate) * up

            def project(x: Tensor, weight: Tensor = down, scale: Tensor = weights) -> Tensor:
                return x @ weight.T * scale

            x = self.values(self.x[tokens], self.x_scale, tokens)
            hidden = self.values(self.hidden[run], self.hidden_scale, run)
            results[0][run], results[1][pairs] = activate(x), project(hidden)
            if self.op.kind != "none":
                unquantized = activate(self.tokens[tokens].float())
                errors[0] += (results[0][run] - unquantized).double().square().sum()
                unquantized = project(self.activated[run].float())
                errors[1] += (results[1][pairs] - unquantized).double().square().sum()
        return {
            name: Expected(result, float((error / result.numel()).sqrt()))
            for name, result, error in zip(NAMES, results, errors, strict=True)
        }

    def values(self, codes: Tensor, scale: Tensor | None, rows: Tensor | slice) -> Tensor:
        """Return the float32 values of rows of the inputs. Inputs have scales for each row, or each group of it."""
        if scale is None:
            return codes.float()
        scale = scale[rows]
        if self.op.kind == "block":
            scale = scale.repeat_interleave(GROUP, dim=1)[:, : codes.shape[1]]
        return codes.float() * scale

    def floor(self, name: str, bandwidth: float, peak: float) -> float:
        """Return the µs that a GEMM takes at least, for bytes/s and operations/s in bfloat16."""
        used = int((self.counts > 0).sum())
        elements = self.size * self.inner * (2 if name == "gate_up" else 1)
        num_bytes, operations = used * elements, 2 * len(self.pairs) * elements
        if self.op.kind == "none":
            num_bytes *= 2
        else:
            peak *= 2
        return float(max(num_bytes / bandwidth, operations / peak) * 1e6)


def checked_error(found: Tensor, expected: Expected) -> float | None:
    """Return the error of a result (see `Timing`). Exits if the result is wrong."""
    difference = found.float() - expected.values
    error = float(difference.norm() / expected.values.norm().clamp(min=1e-6))
    if not error < 1e-2:
        raise SystemExit(f"wrong result: relative error {error:.2e}")
    if expected.quantization_error == 0:
        return None
    return float(difference.square().mean().sqrt()) / expected.quantization_error


def compile_all(op: Op, model: dict[str, Any], num_tokens: int) -> None:
    """Compile the kernels of all tilings in background threads."""
    num_experts, top_k, size, inner = (
        model[name] for name in ("num_experts", "top_k", "hidden_size", "intermediate_size")
    )
    num_pairs, blank = num_tokens * top_k, partial(precompile.blank, str(op.dtype).split(".")[1])
    routed = precompile.blank("int32", num_pairs), precompile.blank("int32", num_pairs, 3)
    weights = precompile.blank("float32", num_tokens, top_k)
    scale = precompile.blank("float32", num_experts, 1)
    scales = None if op.kind == "none" else Scales(op.kind, scale, scale, torch.bfloat16)
    average = num_pairs / num_experts
    gate_up = blank(num_tokens, size), blank(num_experts, 2 * inner, size)
    for tiling in tilings_of(op, "gate_up", average):
        launch = partial(run_gate_up, scales=scales)
        precompile.compile_for(launch, tiling, *gate_up, *routed, top_k)
    down = blank(num_pairs, inner), blank(num_experts, size, inner)
    for tiling in tilings_of(op, "down", average):
        precompile.compile_for(partial(run_down, scales=scales), tiling, *down, *routed, weights)


def sweep(case: Case, name: str, expected: Expected) -> list[Timing]:
    """Return the times of all tilings of a GEMM, after that of the tiling in use."""
    call = getattr(case, name)
    times = []
    for tiling in tilings_of(case.op, name, case.average):
        gemm = tiling.up if name == "gate_up" else tiling.down
        try:
            tiles = case.tiles(tiling)
            error = checked_error(call(tiling, 0, tiles), expected)
            run = partial(lambda layer, t, of: call(t, layer, of), t=tiling, of=tiles)
            took = timed(run, len(case.layers))
        except (RuntimeError, torch.AcceleratorError) as failure:
            print(f"  {tiling.block_m} {gemm}: {str(failure).splitlines()[0][:80]}")
            continue
        except Exception as failure:  # Triton's own: too much shared memory
            if type(failure).__name__ != "OutOfResources":
                raise
            continue
        times.append(Timing(took, tiling.block_m, gemm, error, tiling.halves))
    return times


def grouped_mm(case: Case, name: str) -> float:
    """Return the µs of PyTorch's grouped GEMM for sorted rows of bfloat16."""
    ends = case.counts.cumsum(0).to(torch.int32)
    x = case.x[case.pairs.long() // case.top_k] if name == "gate_up" else case.hidden
    at = NAMES.index(name)
    return timed(
        lambda layer: torch._grouped_mm(x, case.layers[layer][at].codes.transpose(1, 2), offs=ends),
        len(case.layers),
    )


def text_of(timing: Timing) -> str:
    """Describe a tiling."""
    gemm = timing.gemm
    order = ", weights first" if gemm.weights_first else ", joined" if gemm.joined else ""
    order += ", TMA" if gemm.tma else ""
    order += f", {gemm.together} together" if gemm.together > 1 else ""
    sums = "" if gemm.max_inexact is None else f", sums of {gemm.max_inexact}"
    return (
        f"{timing.us:.1f} ({timing.block_m}x{gemm.columns}x{gemm.block_k}, {gemm.num_warps} warps, "
        f"{gemm.num_stages} stages{order}{sums})"
    )


def best_pair(times: dict[str, list[Timing]]) -> str:
    """Describe the fastest two GEMMs with the same pairs per tile, beside the ones in use, which come first."""
    blocks = set.intersection(*({each.block_m for each in times[name]} for name in NAMES))
    pairs = [
        [min((each for each in times[name] if each.block_m == block), key=us_of) for name in NAMES]
        for block in blocks
    ]
    up, down = min(pairs, key=lambda pair: pair[0].us + pair[1].us)
    ours = sum(times[name][0].us for name in NAMES)
    return f"{ours:8.1f} {up.us + down.us:8.1f}   {text_of(up)} + {text_of(down)}"


def pairs_of(times: dict[str, list[Timing]]) -> dict[Tiling, float]:
    """Return the µs of each tiling: two GEMMs with the same pairs per tile. The tiling in use is the first.

    GEMMs with a larger error than the one in use (`MAX_ERROR`) are left out.
    """
    precise = {
        name: [
            each
            for each in found
            if each.error is None or each.error <= MAX_ERROR * (found[0].error or 0.0)
        ]
        for name, found in times.items()
    }
    return {
        Tiling(up.block_m, up.gemm, down.gemm, up.halves): up.us + down.us
        for up, down in itertools.product(*(precise[name] for name in NAMES))
        if (up.block_m, up.halves) == (down.block_m, down.halves)
    }


Cases = list[tuple[float, dict[Any, float]]]  # pairs per expert, and the µs of each tiling


def time_whole_op(
    op_name: str, models: list[str] | None, num_tokens: list[int], rows: list[dict[str, Any]]
) -> Cases:
    """Time an op of WHOLE_OPS, print a line for each number of tokens, and add all times to `rows`."""
    op, cases = WHOLE_OPS[op_name], []
    contract = installed_ops(Catalog.discover())[op.name]
    for model in models or op.models:
        for num, average, times in sweep_whole(op, contract, model, num_tokens):
            best = min(times, key=lambda each: times[each])
            ours = next(iter(times))
            print(
                f"{op_name} {model} {num} tokens: chosen {times[ours]:.1f} {ours}; "
                f"best {times[best]:.1f} {best}",
                flush=True,
            )
            case = {"op": op_name, "model": model, "tokens": num}
            rows += [case | {"us": us} | asdict(tiling) for tiling, us in times.items()]
            cases.append((average, times))
    return cases


def main() -> None:
    """Print a line for each number of tokens and GEMM, and a table of the best tilings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ops",
        choices=(*OPS, *WHOLE_OPS),
        nargs="+",
        default=["bf16"],
        help="data types to time",
    )
    parser.add_argument("--models", choices=SHAPES, nargs="+", help="models (default: by op)")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[16, 64, 256, 8192], help="tokens per step"
    )
    parser.add_argument("--layers", type=int, default=3, help="layers in a CUDA graph")
    parser.add_argument("--top", type=int, default=3, help="number of tilings to print")
    parser.add_argument(
        "--bandwidth", type=float, default=4.5e12, help="bytes per second, for the floor"
    )
    parser.add_argument(
        "--peak", type=float, default=800e12, help="bfloat16 operations per second, for the floor"
    )
    parser.add_argument("--json", type=Path, help="write all times to this file")
    parser.add_argument("--out", type=Path, help="update the tilings in this file")
    options = parser.parse_args()
    pair_ops = [each for each in options.ops if each in OPS]
    for op_name, num_tokens in itertools.product(pair_ops, options.tokens):
        for model_name in options.models or OPS[op_name].models:
            compile_all(OPS[op_name], SHAPES[model_name], num_tokens)
    rows: list[dict[str, Any]] = []
    table, tuned = [], {}
    for op_name in (each for each in options.ops if each in WHOLE_OPS):
        found = time_whole_op(op_name, options.models, options.tokens, rows)
        op_in_use = WHOLE_OPS[op_name]
        tuned[op_in_use.name] = list(tuned_table(op_in_use.tilings(), found))
    for op_name in pair_ops:
        op, timed_cases = OPS[op_name], []
        for model_name in options.models or op.models:
            model = SHAPES[model_name]
            num_experts, size, inner = (
                model[name] for name in ("num_experts", "hidden_size", "intermediate_size")
            )
            num_bytes = 3 * num_experts * size * inner * op.dtype.itemsize
            layers = [
                (
                    Weight(op, num_experts, 2 * inner, size),
                    Weight(op, num_experts, size, inner),
                )
                for _ in range(options.layers if num_bytes < LAYER_BYTES else 1)
            ]
            cases = [Case(op, model, num_tokens, layers) for num_tokens in options.tokens]
            for case, num_tokens in zip(cases, options.tokens, strict=True):
                expected, times = case.expected(), {}
                for name in NAMES:
                    times[name] = sweep(case, name, expected[name])
                    ours, *others = times[name]
                    library = ""
                    if op.kind == "none":
                        library = f", grouped_mm {grouped_mm(case, name):.1f}"
                    floor = case.floor(name, options.bandwidth, options.peak)
                    best = "; ".join(
                        text_of(each) for each in sorted(others, key=us_of)[: options.top]
                    )
                    print(
                        f"{op_name} {model_name} {num_tokens} tokens, {name}: floor {floor:.1f}, "
                        f"chosen {text_of(ours)}{library}; best {best}",
                        flush=True,
                    )
                    for each in times[name]:
                        if each.error is not None:
                            print(f"  error {each.error:.4f}, {text_of(each)}")
                    rows += [
                        {"op": op_name, "model": model_name, "tokens": num_tokens, "gemm": name}
                        | {"us": each.us, "block_m": each.block_m, "error": each.error}
                        | asdict(each.gemm)
                        for each in times[name]
                    ]
                label = f"{op_name:10} {model_name:17} {num_tokens:6}"
                table.append(f"{label} {best_pair(times)}")
                timed_cases.append((case.average, pairs_of(times)))
        tuned[op.name] = list(tuned_table(op.tilings, timed_cases))
    if table:
        print(
            f"{'op':10} {'model':17} {'tokens':>6} {'chosen':>8} {'best':>8}   gate_up + down, µs"
        )
        print("\n".join(table))
    if options.out:
        update(options.out, torch.cuda.get_device_capability(), tuned)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def us_of(timing: Timing) -> float:
    """Return the µs of a timed tiling."""
    return timing.us


if __name__ == "__main__":
    main()
