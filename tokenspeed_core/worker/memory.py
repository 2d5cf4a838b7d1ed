"""The size of the KV arena."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenspeed_core.api.cache_groups import CacheGroupSpec
from tokenspeed_core.errors import CapacityError

_BLOCK_ALIGNMENT = 256
_HOST_MOST = 4 << 30
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What bounds the pool. `num_blocks` excludes the runner's own padding block.

    `num_least` blocks hold one sequence of the greatest length.
    """

    block_bytes: int
    block_size: int
    num_groups: int
    num_least: int

    @classmethod
    def of(
        cls, groups: Sequence[CacheGroupSpec], block_size: int, dtype_bytes: int, max_model_len: int
    ) -> PoolLimits:
        """Return the limits of a pool: each block is as large as the largest group needs."""
        largest = max(group.block_bytes(block_size, dtype_bytes) for group in groups)
        blocks = -(-max_model_len // block_size)
        return cls(
            block_bytes=-(-largest // _BLOCK_ALIGNMENT) * _BLOCK_ALIGNMENT,
            block_size=block_size,
            num_groups=len(groups),
            num_least=blocks * len(groups),
        )

    def blocks_of_tokens(self, num_tokens: int) -> int:
        """Return the blocks of a pool of `--max-total-tokens`."""
        return max(1, -(-num_tokens // self.block_size)) * self.num_groups

    def blocks_of_bytes(self, num_bytes: int, flag: str) -> int:
        """Return the blocks that fit into bytes which the user gave. Raises CapacityError if not two do."""
        blocks = num_bytes // self.block_bytes - 1
        if blocks < 1:
            raise CapacityError(
                f"{flag} {num_bytes} holds no block: one of {self.block_size} tokens takes {self.block_bytes} bytes "
                f"and the runner keeps one more for itself; give {flag} at least {2 * self.block_bytes}"
            )
        return blocks


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """A device's memory in bytes, after the weights were loaded and the largest step was tried.

    `others` is what other programs and the driver hold; `weights` what stays; `peak` the most that a step
    takes beside the weights; `reserve` what is allocated later (graphs, penalties).
    """

    total: int
    utilization: float
    others: int
    weights: int
    peak: int
    reserve: int

    @property
    def left(self) -> int:
        """Bytes for the arena; negative if the weights alone are too large."""
        return (
            int(self.total * self.utilization)
            - self.others
            - self.weights
            - self.peak
            - self.reserve
        )


def blocks_of_device(limits: PoolLimits, budget: DeviceBudget) -> int:
    """Return the blocks of a pool that fills a device's budget.

    Raises CapacityError, naming what is missing, if a sequence of the greatest length does not fit.
    """
    blocks = budget.left // limits.block_bytes - 1
    if blocks >= limits.num_least:
        return blocks
    missing = (limits.num_least + 1) * limits.block_bytes - budget.left
    tokens = max(0, blocks) // limits.num_groups * limits.block_size
    hints = []
    if tokens:
        hints.append(f"--max-model-len {tokens}")
    if budget.utilization < 0.95:
        hints.append(f"--gpu-memory-utilization above {budget.utilization:g}")
    hints.append(
        "fewer --max-num-seqs or a smaller --chunked-prefill-size (they set the step's memory)"
    )
    raise CapacityError(
        f"{missing / GIB:.2f} GiB are missing for one sequence of the greatest length: of "
        f"{budget.total / GIB:.1f} GiB × {budget.utilization:g}, weights take {budget.weights / GIB:.2f}, a step "
        f"{budget.peak / GIB:.2f}, graphs and tables {budget.reserve / GIB:.2f}, other programs "
        f"{budget.others / GIB:.2f}, which leaves {max(0, budget.left) / GIB:.2f}; try "
        + ", or ".join(hints)
    )


def blocks_of_host(limits: PoolLimits, available: int, wanted: int | None = None) -> int:
    """Return the blocks of a CPU's pool: those `wanted`, else a modest number.

    That is a quarter of the `available` bytes, 4 GiB at most, and no more than 256 sequences of the greatest
    length could use. Raises CapacityError if not one fits, or what is wanted exceeds what is available: the
    system would grant the memory all the same, and end the process when it comes to be used.
    """
    if wanted is not None:
        if (wanted + 1) * limits.block_bytes > available:
            raise CapacityError(
                f"a KV cache of {wanted * limits.block_bytes / GIB:.2f} GiB does not fit: {available / GIB:.2f} GiB of "
                "memory are free; lower --max-total-tokens or --kv-cache-memory, or leave them out"
            )
        return wanted
    blocks = min(available // 4, _HOST_MOST) // limits.block_bytes - 1
    if blocks < limits.num_least:
        needed = (limits.num_least + 1) * limits.block_bytes
        raise CapacityError(
            f"one sequence of the greatest length takes {needed / GIB:.2f} GiB of KV cache, and the CPU's default "
            f"is {min(available // 4, _HOST_MOST) / GIB:.2f} GiB; give --kv-cache-memory {needed} or a smaller "
            "--max-model-len"
        )
    return min(blocks, 256 * limits.num_least)
