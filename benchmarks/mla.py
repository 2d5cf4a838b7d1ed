# mypy: allow-untyped-calls
"""Check and time the kernels of latent attention (MLA) on a GPU, for DeepSeek-V2-Lite (16 heads) and V3 (128 heads).

    python benchmarks/mla.py [--heads 16 128] [--tilings] [--kv-dtype bfloat16]
    python benchmarks/mla.py --heads 16 --rows 256 --context 640 --tilings --only-decode
    python benchmarks/mla.py --heads 16 --only-shared --tilings
    python benchmarks/mla.py --backends triton flashmla --rows 1 16 32 64 128 --context 1024 2048 4096 8192

First compares each op with its reference. Then prints µs per layer in bfloat16, medians of 7, over layers whose caches
together exceed the L2 cache, in a CUDA graph where the kernels allow it, next to the times that reading the bytes and
computing the products takes at the device's peak. `--tilings` also times other tilings. Decodes that share a prefix are
timed with and without reading it once; `--only-shared` times nothing else. `--backends` times only `mla_decode`, with each
of these backends. Its floor uses the measured rates of a copy and a large GEMM.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch
from kernels import ceilings
from tokenspeed_testing.conformance import agrees_with_reference
from tokenspeed_testing.shapes import contract_of
from torch import Tensor

from tokenspeed_core.kernels.installed import installed_kernels, installed_ops
from tokenspeed_core.kernels.overrides import Override
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.worker.platform import describe_device
from tokenspeed_kernels import descriptors
from tokenspeed_kernels.options import SharedPrefixOptions
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.attention.shared_prefix import find_shared_prefix
from tokenspeed_kernels.triton.mla.absorbed import AbsorbedAttention, Tiling
from tokenspeed_kernels.triton.mla.heads import mla_absorb, mla_project
from tokenspeed_kernels.triton.mla.prefill import MlaPrefill
from tokenspeed_kernels.triton.mla.write import mla_write

LATENT, ROPE, NOPE, VALUE, BLOCK_SIZE = 512, 64, 128, 128, 64
ENTRY = LATENT + ROPE
SCALE = (NOPE + ROPE) ** -0.5
BANDWIDTH, PEAK = 4.8e12, 989e12  # bytes and bfloat16 operations per second of an H200
CACHE_BYTES = 400e6  # of all layers together, many times the L2 cache
OPS = ("mla_write", "mla_absorb", "mla_decode", "mla_project", "mla_prefill")
DECODE_ROWS = (1, 16, 128)
DECODE_TILINGS = (
    Tiling(16, 32, 4, 2),
    Tiling(16, 32, 4, 3),
    Tiling(16, 16, 4, 4),
    Tiling(16, 32, 2, 2),
    Tiling(16, 64, 4, 2),
    Tiling(16, 32, 8, 3),
    Tiling(16, 64, 8, 3),
    Tiling(16, 64, 8, 5),
    Tiling(32, 32, 8, 3),
    Tiling(64, 32, 8, 2),
    Tiling(64, 32, 8, 3),
    Tiling(64, 64, 8, 2),
)
# Tiles of 128 rows need too many registers.
SHARED_TILINGS = (Tiling(64, 64, 8, 2), Tiling(64, 32, 8, 2), Tiling(64, 32, 8, 3))
SHARED_SPLITS = (8, 16)
SHARED_DECODES = ((64, 4096), (32, 16384))  # rows, and entries that they share
PREFILL_TILINGS = (
    Tiling(128, 64, 8, 3),
    Tiling(128, 64, 8, 2),
    Tiling(128, 128, 8, 2),
    Tiling(64, 64, 4, 3),
    Tiling(64, 64, 4, 2),
)


@dataclass(frozen=True, slots=True)
class Prefill:
    """One row of a step: its query tokens, the tokens before them, and whether the host knows these numbers."""

    num_queries: int
    num_context: int
    is_known: bool = True

    def __str__(self) -> str:
        known = "" if self.is_known else ", captured"
        return f"prefill {self.num_queries} after {self.num_context}{known}"


PREFILLS = (
    Prefill(8192, 0),
    Prefill(8192, 8192),
    Prefill(2048, 16384),
    Prefill(512, 4096),
    Prefill(64, 16384),
    Prefill(2048, 0, is_known=False),
    Prefill(2048, 4096, is_known=False),
)


class Layers:
    """Caches and expansions of several layers, for rows of one length."""

    def __init__(self, heads: int, num_rows: int, length: int, kv_dtype: str) -> None:
        num_blocks = num_rows * -(-length // BLOCK_SIZE)
        num_bytes = num_blocks * BLOCK_SIZE * ENTRY * (1 if kv_dtype.startswith("float8") else 2)
        num_layers = max(2, min(64, round(CACHE_BYTES / num_bytes)))
        shape = (num_blocks, num_layers, BLOCK_SIZE, ENTRY)
        arena = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
        for index in range(num_layers):
            arena[:, index].normal_()
        arena = arena.to(getattr(torch, kv_dtype))
        self.caches = arena.unbind(1)
        self.expansions = [
            _random(heads, NOPE + VALUE, LATENT) / LATENT**0.5 for _ in range(num_layers)
        ]
        order = torch.randperm(num_blocks, dtype=torch.int32, device="cuda")
        self.table = order.view(num_rows, -1)
        self.lengths = torch.full((num_rows,), length, dtype=torch.int32, device="cuda")

    def share(self, num_shared: int, own: tuple[int, int]) -> None:
        """Let rows share their first entries, with own entries from `own[0]` to `own[1]`."""
        num_blocks = num_shared // BLOCK_SIZE
        self.table[:, :num_blocks] = self.table[0, :num_blocks].clone()
        lengths = torch.linspace(num_shared + own[0], num_shared + own[1], len(self.lengths))
        self.lengths.copy_(lengths)


def main() -> None:
    """Check, then time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--heads", type=int, nargs="+", default=[16, 128], help="numbers of query heads"
    )
    parser.add_argument("--tilings", action="store_true", help="also time other tilings")
    parser.add_argument("--kv-dtype", default="bfloat16", help="bfloat16 or float8_e4m3fn")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=DECODE_ROWS, help="numbers of decode rows"
    )
    parser.add_argument(
        "--context", type=int, nargs="+", default=[4096], help="cache entries per decode row"
    )
    parser.add_argument("--only-decode", action="store_true", help="skip prefills")
    parser.add_argument(
        "--only-shared", action="store_true", help="time only decodes with a shared prefix"
    )
    parser.add_argument(
        "--backends", nargs="+", metavar="NAME", help="time only mla_decode of these backends"
    )
    parser.add_argument(
        "--own",
        type=int,
        nargs=2,
        default=(1600, 1600),
        help="minimum and maximum of a row's own entries",
    )
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cache {options.kv_dtype}")
    for heads in options.heads:
        problem = _problem(heads, options.kv_dtype)
        if not options.backends:
            check(problem, ("mla_decode",) if options.only_shared else OPS)
        times = backend_rows if options.backends else rows
        for name, microseconds, floor in times(problem, options):
            print(f"{heads:4} heads  {name:88} {microseconds:9.1f} µs   floor {floor:8.1f} µs")


def check(problem: dict[str, Any], ops: Sequence[str]) -> None:
    """Compare these ops with their references. Raises AssertionError."""
    specs = {
        spec.op: spec
        for spec in (
            *descriptors.TRITON_CACHE,
            *descriptors.TRITON_LINEAR,
            *descriptors.TRITON_ATTENTION,
        )
        if spec.op in ops
    }
    for op, spec in specs.items():
        contract = contract_of(spec)
        phase = "prefill" if op == "mla_prefill" else "decode"
        cut = contract.cut({**problem, "phase": phase})
        kernels = [spec.factory()(cut)]
        if op == "mla_prefill":
            kernels.append(MlaPrefill(cut, max_small_step=0, absorbed_tokens=64))
        for kernel in kernels:
            for num_rows in (1, 6, 7, 33):
                agrees_with_reference(
                    kernel, contract, cut, num_rows, torch.device("cuda"), strided=True
                )
        print(f"{problem['num_heads']:4} heads  {op} agrees with its reference")


def rows(
    problem: dict[str, Any], options: argparse.Namespace
) -> Iterator[tuple[str, float, float]]:
    """Yield a description, µs per layer, and the µs of the floor."""
    for num_rows, num_shared in SHARED_DECODES:
        yield from shared_rows(
            problem, num_rows, num_shared, options.own, with_tilings=options.tilings
        )
    for num_rows, context in () if options.only_shared else product(options.rows, options.context):
        yield from decode_rows(problem, num_rows, context, with_tilings=options.tilings)
    for prefill in () if options.only_decode or options.only_shared else PREFILLS:
        yield from prefill_rows(problem, prefill, with_tilings=options.tilings)


def backend_rows(
    problem: dict[str, Any], options: argparse.Namespace
) -> Iterator[tuple[str, float, float]]:
    """Time `mla_decode` of each named backend, after a check. Raises SelectionError for a backend that cannot run."""
    best = ceilings(torch.device("cuda"))
    kernels = {name: backend_kernel(problem, name) for name in options.backends}
    for num_rows, context in product(options.rows, options.context):
        layers = Layers(problem["num_heads"], num_rows, context, problem["kv_dtype"])
        q = _random(num_rows, problem["num_heads"], ENTRY)
        operations = 2 * q[..., 0].numel() * context * (ENTRY + LATENT)
        cache_bytes = num_rows * context * ENTRY * layers.caches[0].element_size()
        floor = max(cache_bytes / best.bandwidth, operations / best.flops) * 1e6
        for name, kernel in kernels.items():
            call = backend_call(kernel, q, layers, context)
            yield f"decode {num_rows} x {context}: {name}", timed(call, len(layers.caches)), floor


def backend_call(kernel: Any, q: Tensor, layers: Layers, context: int) -> Callable[[int], object]:
    """Return a call of layer `i`. A kernel with a plan gets one for all layers, as in a step."""
    caches, table, lengths = layers.caches, layers.table, layers.lengths
    plan = kernel.plan() if hasattr(kernel, "plan") else None
    return lambda i: kernel(q, caches[i], table, lengths, context, SCALE, plan)


def backend_kernel(problem: dict[str, Any], name: str) -> Callable[..., Tensor]:
    """Return the kernel of a backend after a comparison with the reference. Raises SelectionError if it cannot run."""
    catalog, device = Catalog.discover(), torch.device("cuda")
    contracts = installed_ops(catalog)
    contract = contracts["mla_decode"]
    cut = contract.cut({**problem, "phase": "decode"})
    override = Override.parse("mla_decode", (name,))
    selector = Selector(
        installed_kernels(catalog), describe_device(device), [override], ops=contracts
    )
    kernel: Callable[..., Tensor] = selector.select("mla_decode", cut).spec.factory()(cut)
    for num_rows in (1, 6, 7, 33):
        agrees_with_reference(kernel, contract, cut, num_rows, device, strided=True)
    print(f"{problem['num_heads']:4} heads  {name} agrees with its reference")
    return kernel


def decode_rows(
    problem: dict[str, Any], num_rows: int, context: int, *, with_tilings: bool
) -> Iterator[tuple[str, float, float]]:
    """Time each op of a decode step."""
    heads = problem["num_heads"]
    layers = Layers(heads, num_rows, context, problem["kv_dtype"])
    q, kv = _random(num_rows, heads, NOPE + ROPE), _random(num_rows, ENTRY)
    absorbed, latents = _random(num_rows, heads, ENTRY), _random(num_rows, heads, LATENT)
    out = _random(num_rows, heads, VALUE)
    write, absorb, project = mla_write(problem), mla_absorb(problem), mla_project(problem)
    norm_weight, angles = _random(LATENT), torch.rand(context, ROPE, device="cuda")
    positions = layers.lengths.long() - 1
    slots = layers.table[:, -1].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    weight_bytes = 2 * heads * (NOPE + VALUE) * LATENT
    cache_bytes = num_rows * context * ENTRY * layers.caches[0].element_size()
    pairs = num_rows * heads * context

    def attend(tiling: Tiling | None) -> Callable[[int], object]:
        kernel = AbsorbedAttention(problem, tiling)
        return lambda i: kernel.decode(
            absorbed, layers.caches[i], layers.table, layers.lengths, context, SCALE
        )

    def whole(i: int) -> None:
        cache, kv_up = layers.caches[i], layers.expansions[i]
        write(q, kv, norm_weight, 1e-6, positions, angles, True, cache, slots, 1.0)
        y = kernel.decode(absorb(q, kv_up), cache, layers.table, layers.lengths, context, SCALE)
        project(y, kv_up, out)

    kernel = AbsorbedAttention(problem)
    operations = 2 * pairs * (ENTRY + LATENT)
    projection = 2 * num_rows * heads * LATENT * NOPE
    floor = _floor(cache_bytes, operations)
    name = f"decode {num_rows} x {context}"
    count = len(layers.caches)
    yield f"{name}: mla_decode", timed(attend(None), count), floor
    yield (
        f"{name}: mla_write",
        timed(
            lambda i: write(
                q, kv, norm_weight, 1e-6, positions, angles, True, layers.caches[i], slots, 1.0
            ),
            count,
        ),
        0.0,
    )
    half = _floor(weight_bytes / 2, projection)
    yield f"{name}: mla_absorb", timed(lambda i: absorb(q, layers.expansions[i]), count), half
    yield (
        f"{name}: mla_project",
        timed(lambda i: project(latents, layers.expansions[i], out), count),
        half,
    )
    yield f"{name}: all four", timed(whole, count), floor + 2 * half
    if with_tilings and find_spec("tokenspeed_kernels_blackwell"):
        from tokenspeed_kernels_blackwell.mla.decode import mla_decode

        # Entries are the rows of its GEMMs, which also suits the wide instructions of Hopper.
        other = mla_decode(problem)
        cache = layers.caches[0]
        expected = kernel.decode(absorbed, cache, layers.table, layers.lengths, context, SCALE)
        found = other(absorbed, cache, layers.table, layers.lengths, context, SCALE)
        torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
        time = timed(
            lambda i: other(
                absorbed, layers.caches[i], layers.table, layers.lengths, context, SCALE
            ),
            count,
        )
        yield f"{name}: mla_decode of tokenspeed-kernels-blackwell", time, floor
    tilings = DECODE_TILINGS if with_tilings else ()
    for tiling in tilings:  # compiled in background threads
        precompile.compile_for(attend(tiling), 0)
    for tiling in tilings:
        yield f"{name}: mla_decode {tiling}", _try(partial(timed, attend(tiling), count)), floor


def shared_rows(
    problem: dict[str, Any],
    num_rows: int,
    num_shared: int,
    own: tuple[int, int],
    *,
    with_tilings: bool,
) -> Iterator[tuple[str, float, float]]:
    """Time decodes of rows with a common prefix."""
    heads, longest = problem["num_heads"], num_shared + own[1]
    layers = Layers(heads, num_rows, longest, problem["kv_dtype"])
    layers.share(num_shared, own)
    absorbed = _random(num_rows, heads, ENTRY)
    find = find_shared_prefix(problem, SharedPrefixOptions())
    shared = torch.tensor([num_shared, 0], dtype=torch.int32, device="cuda")
    nothing = torch.zeros_like(shared)

    def decode(kernel: AbsorbedAttention, prefix: Tensor | None, i: int) -> Tensor:
        cache = layers.caches[i % len(layers.caches)]
        table, lengths = layers.table, layers.lengths
        return kernel.decode(absorbed, cache, table, lengths, longest, SCALE, prefix)

    # Several times each layer, so that launching the graph hardly counts.
    kernel, count = AbsorbedAttention(problem), 8 * len(layers.caches)
    expected = decode(kernel, None, 0)
    torch.testing.assert_close(decode(kernel, shared, 0), expected, atol=0.02, rtol=0.02)
    entry_bytes = ENTRY * layers.caches[0].element_size()
    num_entries = int(layers.lengths.sum())
    operations = 2 * heads * num_entries * (ENTRY + LATENT)
    floor = _floor((num_entries - (num_rows - 1) * num_shared) * entry_bytes, operations)
    name = f"decode {num_rows} x ({num_shared} shared + {own[0]} to {own[1]})"
    separate = timed(partial(decode, kernel, None), count)
    yield f"{name}: separate", separate, _floor(num_entries * entry_bytes, operations)
    yield f"{name}: shared", timed(partial(decode, kernel, shared), count), floor
    time = timed(partial(decode, kernel, nothing), count) - separate
    yield f"{name}: added if nothing is shared", time, 0.0
    yield (
        f"{name}: search, once per step",
        timed(lambda _: find(layers.table, layers.lengths), count),
        0.0,
    )
    others = {
        f"{tiling}, {splits} splits": AbsorbedAttention(problem, None, tiling, splits)
        for tiling, splits in product(SHARED_TILINGS if with_tilings else (), SHARED_SPLITS)
    }
    for other in others.values():  # compiled in background threads
        precompile.compile_for(decode, other, shared, 0)
    for what, other in others.items():
        time = _try(partial(timed, partial(decode, other, shared), count))
        yield f"{name}: shared, {what}", time, floor


def prefill_rows(
    problem: dict[str, Any], step: Prefill, *, with_tilings: bool
) -> Iterator[tuple[str, float, float]]:
    """Time one row of a prefill step."""
    heads = problem["num_heads"]
    num, length = step.num_queries, step.num_queries + step.num_context
    layers = Layers(heads, 1, length, problem["kv_dtype"])
    q, out = _random(num, heads, NOPE + ROPE), _random(num, heads, VALUE)
    starts = torch.tensor([0, num], dtype=torch.int32, device="cuda")
    known_starts, known_lengths = ((0, num), (length,)) if step.is_known else (None, None)

    def run(kernel: MlaPrefill, i: int) -> None:
        kernel(
            q,
            layers.caches[i],
            layers.expansions[i],
            starts,
            layers.lengths,
            layers.table,
            known_starts,
            known_lengths,
            4 * 8192,
            SCALE,
            out,
        )

    pairs = heads * (num * step.num_context + num * (num + 1) / 2)
    expansion = 2 * heads * LATENT * (NOPE + VALUE) * length
    floor = _floor(
        length * ENTRY * layers.caches[0].element_size(),
        2 * pairs * (NOPE + ROPE + VALUE) + expansion,
    )
    count = min(len(layers.caches), 8)
    kernel = MlaPrefill(problem)
    yield str(step), timed(partial(run, kernel), count), floor
    for tiling in PREFILL_TILINGS if with_tilings and step.num_queries == 8192 else ():
        other = MlaPrefill(problem, tiling)
        yield f"{step}: {tiling}", _try(partial(timed, partial(run, other), count)), floor


def timed(run: Callable[[int], object], num_layers: int) -> float:
    """Return the µs per layer of `run(layer)` in a CUDA graph of all layers, the median of 7."""
    for index in range(num_layers):
        run(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(num_layers):
            run(index)
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / num_layers)
    median: float = statistics.median(times)
    return median


def _try(measure: Callable[[], float]) -> float:
    """Return the time, or infinity for a tiling that needs more memory than a multiprocessor has."""
    try:
        return measure()
    except Exception as error:  # Triton has several classes of such errors
        print(f"  {type(error).__name__}: {str(error).splitlines()[0][:100]}")
        return float("inf")


def _problem(heads: int, kv_dtype: str) -> dict[str, Any]:
    return {
        "num_heads": heads,
        "latent_size": LATENT,
        "rope_size": ROPE,
        "nope_size": NOPE,
        "value_size": VALUE,
        "block_size": BLOCK_SIZE,
        "dtype": "bfloat16",
        "kv_dtype": kv_dtype,
    }


def _floor(num_bytes: float, num_operations: float) -> float:
    return max(num_bytes / BANDWIDTH, num_operations / PEAK) * 1e6


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


if __name__ == "__main__":
    main()
