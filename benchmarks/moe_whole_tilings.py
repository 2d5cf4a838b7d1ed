"""Time tilings of experts as whole ops: those with 4-bit weights and those with biases. Their GEMMs share a tiling."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from kernels import time_of
from rank_kernels import (
    COMMON,
    DTYPE,
    agree,
    make_weights,
    problem_of,
    route,
    wait_for_compilers,
)
from tokenspeed_testing.conformance import reference

from tokenspeed_core.api.ops import OpContract
from tokenspeed_kernels.triton.moe import biased_experts, experts_w4a16
from tokenspeed_kernels.triton.moe.tuned import tuned_tilings

CUDA = torch.device("cuda")


@dataclass(frozen=True, slots=True)
class WholeOp:
    """An op, the module of its kernels, and the shapes that are timed by default."""

    name: str
    module: ModuleType
    models: tuple[str, ...]

    def tilings(self) -> tuple[tuple[float, Any], ...]:
        """Return the tilings in use on this device."""
        return tuned_tilings(self.name, self.module.Tiling)


WHOLE_OPS = {
    "w4a16": WholeOp("moe_experts_w4a16", experts_w4a16, COMMON),
    "mxfp4": WholeOp("moe_experts_mxfp4", experts_w4a16, COMMON),
    "biased": WholeOp("moe_biased_experts", biased_experts, ("gpt-oss-20b",)),
    "biased-mxfp4": WholeOp("moe_biased_experts_mxfp4", biased_experts, ("gpt-oss-20b",)),
}


def candidates(op: WholeOp, average: float) -> Iterator[Any]:
    """Yield the tilings to time for an average number of pairs per expert."""
    low, high = min(128, average / 4), max(32, average * 3)
    for block in (each for each in (16, 32, 64, 128) if low <= each <= high):
        few = block <= 32
        warps = (4,) if few else (4, 8)
        if op.module is experts_w4a16:
            for block_n, num_warps, num_stages in itertools.product((64, 128), warps, (3, 4)):
                yield experts_w4a16.Tiling(block_n, block, num_warps, num_stages)
            continue
        columns = ((32, 64), (64, 128)) if few else ((64, 128), (128, 128), (128, 256))
        for (up, down), block_k, num_warps in itertools.product(columns, (64, 128), warps):
            yield biased_experts.Tiling(block, up, down, block_k, num_warps, 3)


def sweep(
    op: WholeOp, contract: OpContract, model: str, num_tokens: Iterable[int]
) -> Iterator[tuple[int, float, dict[Any, float]]]:
    """Yield (tokens, pairs per expert, µs of each tiling), the tiling in use first. Wrong results end the program."""
    problem, tolerance = problem_of(contract, model), contract.tolerance(DTYPE)
    torch.manual_seed(0)
    weights = make_weights(contract, problem, CUDA)
    for num in num_tokens:
        average = num * problem["top_k"] / problem["num_experts"]
        ours = next(tiling for bound, tiling in op.tilings() if average <= bound)
        kernels = {}
        for tiling in dict.fromkeys((ours, *candidates(op, average))):
            table = ((float("inf"), tiling),)
            with patch.object(op.module, "tuned_tilings", lambda *_, table=table: table):
                kernels[tiling] = getattr(op.module, op.name)(problem)
        wait_for_compilers()
        arguments = weights | route(problem, num, CUDA)
        (expected,) = reference(contract, problem, arguments)
        times = {}
        for tiling, kernel in kernels.items():
            call = partial(kernel, *arguments.values())
            try:
                agree(call().float(), expected, tolerance)
                times[tiling] = 1e6 * time_of(call)
            except Exception as failure:  # Triton's own: too much shared memory
                if type(failure).__name__ != "OutOfResources":
                    raise
        yield num, average, times
