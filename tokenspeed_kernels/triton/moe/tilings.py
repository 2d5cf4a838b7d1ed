"""Tilings of the two grouped GEMMs of experts, and which of them fit into the device's shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tokenspeed_kernels.triton.shared_memory import shared_memory


@dataclass(frozen=True, slots=True)
class Gemm:
    """Output columns per tile, features per iteration, warps, pipeline stages, and the order of the operands.

    `joined`: the rows of gate and up alternate in one operand; requires `weights_first=False`.
    `tma`: TMA loads the operands (see `tma_kernel`); for gate and up this requires `joined`.
    `together` consecutive tiles of pairs use a weight tile at the same time.
    The tensor cores add up to `max_inexact` products of FP8 in a short accumulator before a float32 sum, all if None.
    """

    columns: int
    block_k: int
    num_warps: int
    num_stages: int
    weights_first: bool = False
    joined: bool = False
    tma: bool = False
    together: int = 1
    max_inexact: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for an order of operands that the kernel does not have."""
        if (self.joined or self.tma) and self.weights_first:
            raise ValueError("joined and tma require weights_first=False")


@dataclass(frozen=True, slots=True)
class Tiling:
    """Pairs per tile, and the two GEMMs. `halves`: a tile that is at most half full is computed as one of half the size."""

    block_m: int
    up: Gemm
    down: Gemm
    halves: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for a tiling that the kernels do not have."""
        if self.halves and self.block_m < 32:
            raise ValueError("halves require block_m of at least 32, because tl.dot needs 16 rows")
        if self.up.tma and not self.up.joined:
            raise ValueError("tma of gate and up requires joined")

    @classmethod
    def of(
        cls, block_m: int, up: Mapping[str, Any], down: Mapping[str, Any], *, halves: bool = False
    ) -> Tiling:
        """Return the tiling with these fields (see `tuned`)."""
        return cls(block_m, Gemm(**up), Gemm(**down), halves)

    def shared_memory(self, itemsize: int, major: int) -> int:
        """Return the bytes that a program needs at most, for values of `itemsize` bytes and a major compute capability.

        Triton keeps a tile of both operands for each pipeline stage, one less without asynchronous tensor cores.
        """
        is_asynchronous = major in (9, 10)
        return max(
            itemsize
            * gemm.block_k
            * (self.block_m + num_weights * gemm.columns)
            * (gemm.num_stages if is_asynchronous else gemm.num_stages - 1)
            for gemm, num_weights in ((self.up, 2), (self.down, 1))
        )


# (largest average of pairs per expert, tiling); the last average is infinite.
Tilings = tuple[tuple[float, Tiling], ...]


def tiling_for(pairs_per_expert: float, tilings: Tilings) -> Tiling:
    """Return the tiling for an average number of pairs per expert: few are bound by memory, many by compute."""
    return next(tiling for bound, tiling in tilings if pairs_per_expert <= bound)


def fitting_tilings(tilings: Tilings, itemsize: int) -> Tilings:
    """Return the tilings for values of `itemsize` bytes that fit into the device's shared memory, all without a device.

    The next tiling replaces one that does not fit, and the previous one replaces the last. Call once, when binding a
    kernel.
    """
    if itemsize == 4:
        tilings = tuple((bound, _for_float32(tiling)) for bound, tiling in tilings)
    available = shared_memory()
    if available is None:
        return tilings
    major = torch.cuda.get_device_properties().major
    *smaller, (_, last) = (
        (bound, tiling)
        for bound, tiling in tilings
        if tiling.shared_memory(itemsize, major) <= available
    )
    return (*smaller, (float("inf"), last))


def supports_tma(itemsize: int, *sizes: int) -> bool:
    """Return whether TMA can load 16-bit rows of these sizes: their bytes are multiples of 16, and the device has TMA.

    True without a device, for Triton's interpreter. Call once, when binding a kernel.
    """
    has_tma = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0)
    return has_tma and itemsize == 2 and all(size * itemsize % 16 == 0 for size in sizes)


def without_tma(tilings: Tilings) -> Tilings:
    """Return the tilings with operands that the threads load."""
    return tuple(
        (bound, replace(each, up=replace(each.up, tma=False), down=replace(each.down, tma=False)))
        for bound, each in tilings
    )


def _for_float32(tiling: Tiling) -> Tiling:
    """Return the tiling with smaller tiles, because values of float32 take twice the shared memory."""
    up, down = (
        replace(gemm, block_k=min(gemm.block_k, 64), num_stages=min(gemm.num_stages, 2))
        for gemm in (tiling.up, tiling.down)
    )
    return replace(tiling, up=up, down=down)
