# mypy: allow-untyped-calls
"""Rank the backends of ops of experts by the times of their kernels, and write the rankings that `auto` uses.

    python benchmarks/rank_kernels.py moe_experts moe_experts_fp8_block --out tokenspeed_kernels/rankings.py
    python benchmarks/rank_kernels.py moe_experts --device cpu --shapes small --tokens 1 5

A size is a shape of a model and a number of tokens, which choose random experts. A backend is ranked by the geometric
mean, over all sizes, of its time divided by that of the fastest backend. All sizes count the same: by default four are
decodes and one is a prefill. First each result is compared with the reference in float32, within the contract's
tolerance. A backend that differs or fails gets no rank.

Times are medians in CUDA graphs with a flushed L2 cache, as in kernels.py. Kernels that CUDA graphs cannot hold run
without them, marked "eager". The lower bound is the larger of bytes over the measured copy bandwidth, with each used
expert read once, and operations over the measured rate of a large GEMM, twice that rate for 8-bit weights and
activations. Rankings of other ops and compute capabilities stay in the file.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kernels import Ceilings, ceilings, time_of
from moe_decode import MODELS
from ranking_file import update
from tokenspeed_testing.conformance import make_inputs, prepared, reference
from torch import Tensor

from tokenspeed_core.api.kernels import PlatformInfo, Ranking
from tokenspeed_core.api.ops import OpContract, Problem, Tolerance
from tokenspeed_core.errors import ConfigError
from tokenspeed_core.kernels.installed import InstalledKernel, installed_kernels, installed_ops
from tokenspeed_core.kernels.overrides import Override
from tokenspeed_core.kernels.plan import NothingFitsError
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.worker.platform import describe_device, resolve_device

SHAPES: dict[str, dict[str, Any]] = {
    **MODELS,
    "gpt-oss-20b": {
        "num_experts": 32,
        "top_k": 4,
        "hidden_size": 2880,
        "intermediate_size": 2880,
    },
    "small": {"num_experts": 8, "top_k": 2, "hidden_size": 128, "intermediate_size": 128},
}
DTYPE = "bfloat16"
AXES = {"group_size": 128, "alpha": 1.702, "limit": 7.0, "dtype": DTYPE}
COMMON = ("qwen3-30b-a3b", "deepseek-v2-lite")
NUM_TOKENS = (1, 16, 128, 256, 8192)
NUM_DISTINCT = (
    4  # experts with different weights, because random numbers for all experts would take minutes
)
MAX_OUTSIDE = 5e-3  # fraction of values that may exceed the contract's tolerance
NUM_RUNS = 5  # of kernels outside of CUDA graphs


@dataclass(frozen=True, slots=True)
class Op:
    """The default shapes of an op, and its operations per second relative to those of bfloat16."""

    shapes: tuple[str, ...] = COMMON
    rate: float = 1.0


OPS = {
    "moe_experts": Op(),
    "moe_experts_fp8": Op(rate=2.0),
    "moe_experts_fp8_block": Op((*COMMON, "deepseek-v3"), rate=2.0),
    "moe_experts_fp8_static": Op(rate=2.0),
    "moe_experts_int8": Op(rate=2.0),
    "moe_experts_int8_static": Op(rate=2.0),
    "moe_experts_w4a16": Op(),
    "moe_experts_mxfp4": Op(),
    "moe_biased_experts": Op(("gpt-oss-20b",)),
    "moe_biased_experts_mxfp4": Op(("gpt-oss-20b",)),
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """A backend's kernel for one problem."""

    backend: str
    run: Callable[..., Tensor]
    is_graph_safe: bool


@dataclass(frozen=True, slots=True)
class Time:
    """The time of a backend for one size."""

    backend: str
    shape: str
    num_tokens: int
    microseconds: float
    is_graph_safe: bool


def main() -> int:
    """Check, time, rank and write. Return 1 if any backend failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "ops", nargs="+", metavar="OP", choices=OPS, help=f"ops to rank: {', '.join(OPS)}"
    )
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, help="shapes of models (default: by op)"
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=NUM_TOKENS, help="numbers of tokens"
    )
    parser.add_argument(
        "--backends", nargs="+", metavar="NAME", help="backends to rank (default: all)"
    )
    parser.add_argument("--device", default="cuda", help="device to measure")
    parser.add_argument("--out", type=Path, help="update the rankings in this file")
    options = parser.parse_args()
    try:
        device = resolve_device(options.device)
    except ConfigError as error:
        parser.error(str(error))
    platform = describe_device(device)
    capability = platform.compute_capability
    if options.out and capability is None:
        parser.error("--out needs a GPU: a ranking belongs to a compute capability")

    catalog = Catalog.discover()
    installed, contracts = installed_kernels(catalog), installed_ops(catalog)
    failed: dict[tuple[str, str], str] = {}
    # All kernels first, so that background threads compile them together.
    bound = {
        (op, shape): list(bind(contracts[op], shape, installed, platform, options.backends, failed))
        for op in options.ops
        for shape in options.shapes or OPS[op].shapes
    }
    best = ceilings(device) if device.type == "cuda" else None
    print(platform.name, f"torch {torch.__version__}", sep=", ", flush=True)
    if best:
        print(f"copy {best.bandwidth / 1e12:.2f} TB/s, GEMM {best.flops / 1e12:.0f} TFLOP/s")
    wait_for_compilers()
    times: dict[str, list[Time]] = defaultdict(list)
    for (op, shape), kernels in bound.items():
        times[op] += measure(contracts[op], shape, kernels, options.tokens, device, best, failed)
    for (op, backend), why in failed.items():
        print(f"FAILED {op} {backend}, which gets no rank: {why}")
    figures = {
        op: ranked([each for each in found if (op, each.backend) not in failed], platform.name)
        for op, found in times.items()
    }
    for op, found in figures.items():
        print("".join(f"{op} {backend}: {figure}\n" for backend, figure in found), end="")
    if options.out and capability is not None:
        update(
            options.out,
            [Ranking(op, None, capability, each) for op, each in figures.items() if each],
        )
    return 1 if failed else 0


def problem_of(contract: OpContract, shape: str) -> Problem:
    """Return the problem of an op for a shape."""
    return contract.cut({**SHAPES[shape], **AXES})


def bind(
    contract: OpContract,
    shape: str,
    installed: Iterable[InstalledKernel],
    platform: PlatformInfo,
    names: Iterable[str] | None,
    failed: dict[tuple[str, str], str],
) -> Iterator[Kernel]:
    """Yield the kernels of the named backends (None: all) for a shape, and print why others cannot run."""
    op, problem = contract.name, problem_of(contract, shape)
    candidates = [each for each in installed if each.spec.op == op]
    for name in names or dict.fromkeys(each.spec.backend for each in candidates):
        override = Override.parse(op, (name,))
        selector = Selector(candidates, platform, [override], ops={op: contract})
        try:
            spec = selector.select(op, problem).spec
            kernel = spec.factory()(problem)
        except NothingFitsError as error:
            (planned,) = error.plan.ops
            reasons = [each.reasons for each in planned.verdicts if each.backend == name]
            why = reasons[0][0].what if reasons else "no such backend is installed for this op"
            print(f"{op} {shape} {name}: {why}", flush=True)
        except Exception as error:  # libraries may raise anything, such as without a compiler
            failed[op, name] = describe(error)
        else:
            yield Kernel(name, kernel, "graph_safe" in spec.capability.features)


def measure(
    contract: OpContract,
    shape: str,
    kernels: Iterable[Kernel],
    num_tokens: Iterable[int],
    device: torch.device,
    best: Ceilings | None,
    failed: dict[tuple[str, str], str],
) -> Iterator[Time]:
    """Yield the times of the kernels that agree with the reference, and print a line for each number of tokens."""
    problem, tolerance = problem_of(contract, shape), contract.tolerance(DTYPE)
    torch.manual_seed(0)
    weights = make_weights(contract, problem, device)
    for num in num_tokens:
        arguments = weights | route(problem, num, device)
        floor = f"{lower_bound(contract, problem, arguments, best):.1f}" if best else "-"
        line = f"{contract.name} {shape}, {num} tokens: lower bound {floor}"
        (expected,) = reference(contract, problem, arguments)
        for kernel in kernels:
            if (contract.name, kernel.backend) in failed:
                continue
            try:
                given = prepared(kernel.run, contract, arguments)
                call = partial(kernel.run, *given.values())
                agree(call().float(), expected, tolerance)
                microseconds = 1e6 * seconds(call, device, is_graph_safe=kernel.is_graph_safe)
            except Exception as error:  # report every backend
                failed[contract.name, kernel.backend] = f"{shape}, {num} tokens: {describe(error)}"
                continue
            eager = "" if kernel.is_graph_safe else " (eager)"
            line += f", {kernel.backend}{eager} {microseconds:.1f}"
            yield Time(kernel.backend, shape, num, microseconds, kernel.is_graph_safe)
        print(f"{line} µs", flush=True)


def agree(found: Tensor, expected: Tensor, tolerance: Tolerance) -> None:
    """Raise AssertionError if a result [T, N] differs from the expected one by more than the contract's tolerance.

    Few values may exceed it, because the error of a sum has a wide distribution, and there are millions of sums. The
    root mean square of a token may not.
    """
    error = (found - expected).abs()
    is_inside = error <= tolerance.absolute + tolerance.relative * expected.abs()
    outside = 1 - float(is_inside.float().mean())
    assert outside <= MAX_OUTSIDE, f"{outside:.2%} of the values are wrong, by up to {error.max()}"
    error, size = (each.square().mean(dim=1).sqrt() for each in (error, expected))
    is_inside = error <= tolerance.absolute + tolerance.relative * size
    num_wrong = len(is_inside) - int(is_inside.sum())
    assert num_wrong == 0, (
        f"{num_wrong} tokens are wrong, by up to {error.max()} (root mean square)"
    )


def make_weights(contract: OpContract, problem: Problem, device: torch.device) -> dict[str, Any]:
    """Return all arguments in order, with the weights of the experts, and rows that `route` replaces.

    The weights come from the contract's generator. Each expert has those of one of NUM_DISTINCT, in separate memory.
    """
    num_experts = problem["num_experts"]
    num_distinct = min(NUM_DISTINCT, num_experts)
    # With two rows, INT4 weights have zero points and no order of columns.
    few = make_inputs(contract, {**problem, "num_experts": num_distinct}, 2, device, strided=False)
    chosen = torch.randint(0, num_distinct, (num_experts,)).tolist()
    return {
        name: torch.stack([value[each] for each in chosen])
        if isinstance(value, Tensor) and len(value) == num_distinct and name not in contract.rows
        else value
        for name, value in few.items()
    }


def route(problem: Problem, num_tokens: int, device: torch.device) -> dict[str, Tensor]:
    """Return tokens x [T, N] with random experts, ids [T, k], and their weights [T, k]."""
    scores = torch.rand((num_tokens, problem["num_experts"]), device=device)
    ids = scores.argsort(dim=1)[:, : problem["top_k"]].to(torch.int32).contiguous()
    x = torch.randn((num_tokens, problem["hidden_size"]), device=device)
    return {
        "x": x.to(getattr(torch, problem["dtype"])),
        "weights": torch.rand(ids.shape, device=device),
        "ids": ids,
    }


def lower_bound(
    contract: OpContract, problem: Problem, arguments: Mapping[str, Any], best: Ceilings
) -> float:
    """Return the µs that moving the bytes and computing the products takes at least."""
    x, ids, num_experts = arguments["x"], arguments["ids"], problem["num_experts"]
    num_bytes = sum(
        value.nbytes
        for name, value in arguments.items()
        if isinstance(value, Tensor) and name not in contract.rows
    )
    moved = num_bytes * len(ids.unique()) / num_experts + 2 * x.nbytes
    operations = 6 * ids.numel() * problem["hidden_size"] * problem["intermediate_size"]
    rate = best.flops * OPS[contract.name].rate
    return float(max(moved / best.bandwidth, operations / rate) * 1e6)


def seconds(call: Callable[[], object], device: torch.device, *, is_graph_safe: bool) -> float:
    """Return the median time of a call."""
    if device.type == "cuda":
        return time_of(call) if is_graph_safe else time_of(call, graph=False, runs=NUM_RUNS)
    times = []
    for _ in range(NUM_RUNS):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def ranked(times: Iterable[Time], device: str) -> tuple[tuple[str, str], ...]:
    """Return (backend, description of its times), ranked by the mean ratio to the fastest backend."""
    fastest: dict[tuple[str, int], float] = {}
    backends: dict[str, list[Time]] = defaultdict(list)
    for each in times:
        size = each.shape, each.num_tokens
        fastest[size] = min(each.microseconds, fastest.get(size, each.microseconds))
        backends[each.backend].append(each)
    ratios = {
        backend: statistics.geometric_mean(
            each.microseconds / fastest[each.shape, each.num_tokens] for each in found
        )
        for backend, found in backends.items()
    }
    return tuple(
        (backend, figure_of(backends[backend], ratios[backend], device))
        for backend in sorted(ratios, key=lambda backend: ratios[backend])
    )


def figure_of(times: Sequence[Time], ratio: float, device: str) -> str:
    """Return the description of a backend's times."""
    shapes: dict[str, list[str]] = defaultdict(list)
    for each in times:
        shapes[each.shape].append(f"{each.microseconds:.1f}")
    eager = "" if times[0].is_graph_safe else " without CUDA graphs"
    nums = ", ".join(map(str, dict.fromkeys(each.num_tokens for each in times)))
    rows = "; ".join(f"{shape} {', '.join(found)}" for shape, found in shapes.items())
    return (
        f"{ratio:.2f} times the best time, geometric mean of {len(times)} sizes on {device}{eager}; "
        f"µs for {nums} tokens: {rows}"
    )


def wait_for_compilers() -> None:
    """Wait for the threads that compile Triton kernels, which would slow launches."""
    for thread in threading.enumerate():
        if thread.name == "precompile":
            thread.join()


def describe(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


if __name__ == "__main__":
    raise SystemExit(main())
