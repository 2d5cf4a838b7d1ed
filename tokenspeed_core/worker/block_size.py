"""Chooses the block size of the KV cache: the one at which layers and phases get the best-ranked kernels."""

from __future__ import annotations

from collections.abc import Callable

from tokenspeed_core.api.kernels import PHASES
from tokenspeed_core.kernels.plan import KernelPlan, NothingFitsError
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.worker.build import ModelBuild

_BLOCK_SIZES = (16, 32, 64, 128, 256)


def solve_block_size(build: ModelBuild, wanted: int | None, scratch: Callable[[], Selector]) -> int:
    """Return the block size at which layers and phases get the best-ranked backends.

    Among equals, the smallest of 16, 32, …, since prefixes are shared in whole blocks. A `wanted` size is returned
    unchanged. `scratch` makes a selector for trials; its decisions are discarded. Raises SelectionError if no size
    works, with the reasons at the size that satisfied most decisions.
    """
    if wanted is not None:
        return wanted
    found: list[tuple[int, int]] = []
    errors: list[tuple[int, int, NothingFitsError]] = []
    for size in _BLOCK_SIZES:
        attempt = scratch()
        try:
            for layer in build.layers:
                for phase in PHASES:
                    problem = layer.problem(phase=phase, block_size=size)
                    attempt.select_attention(problem, layer=layer.layer)
            for latent in build.latent_layers:
                build.select_latent(attempt, latent, size)
        except NothingFitsError as error:
            (ended,) = error.plan.ops
            reasons = (
                each for v in ended.verdicts if v.backend in ended.wanted for each in v.reasons
            )
            errors.append(
                (
                    len(attempt.plan().ops),
                    -sum("block_size" in each.what for each in reasons),
                    error,
                )
            )
        else:
            found.append((_rank(attempt.plan()), size))
    if not found:
        raise max(errors, key=lambda each: each[:2])[2]
    return min(found)[1]


def _rank(plan: KernelPlan) -> int:
    """Return how many better-ranked candidates a plan rejects only because of the block size."""
    return sum(
        bool(verdict.reasons) and all("block_size" in reason.what for reason in verdict.reasons)
        for planned in plan.ops
        for verdict in planned.verdicts[
            : [each.backend for each in planned.verdicts].index(planned.backend)
        ]
    )
