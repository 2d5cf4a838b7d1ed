"""The size of the KV arena."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenspeed_core.api.cache_groups import CacheGroupSpec, values_per_token
from tokenspeed_core.errors import CapacityError

_BLOCK_ALIGNMENT = 256
_MAX_HOST_BYTES = 4 << 30
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """The block layout of the KV cache. `min_num_blocks` is for one sequence of the maximum length."""

    block_bytes: int
    block_size: int
    num_groups: int
    min_num_blocks: int

    @classmethod
    def of(
        cls, groups: Sequence[CacheGroupSpec], block_size: int, dtype_bytes: int, max_model_len: int
    ) -> PoolLimits:
        """Return the limits of a pool: each block is as large as the largest group needs."""
        largest = block_size * dtype_bytes * max(map(values_per_token, groups))
        blocks = -(-max_model_len // block_size)
        return cls(
            block_bytes=-(-largest // _BLOCK_ALIGNMENT) * _BLOCK_ALIGNMENT,
            block_size=block_size,
            num_groups=len(groups),
            min_num_blocks=blocks * len(groups),
        )

    def blocks_of_tokens(self, num_tokens: int) -> int:
        """Return the blocks of a pool of `--max-total-tokens`."""
        return max(1, -(-num_tokens // self.block_size)) * self.num_groups

    def blocks_of_bytes(self, num_bytes: int, flag: str) -> int:
        """Return how many blocks fit into `num_bytes`, in addition to the padding block. Raises CapacityError if none does."""
        blocks = num_bytes // self.block_bytes - 1
        if blocks < 1:
            raise CapacityError(
                f"{flag} {num_bytes} is too small: a block of {self.block_size} tokens takes {self.block_bytes} bytes, and one "
                f"block is reserved for padding. Use at least {flag} {2 * self.block_bytes}."
            )
        return blocks


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """A device's memory in bytes, measured after loading the weights and running the largest step.

    `others` is held by other programs and the driver, `weights` by the model. `peak` is the largest step's
    additional memory. `reserve` is for later allocations (graphs, penalties).
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
    """Return how many blocks fill a device's budget.

    Raises CapacityError, with the missing memory, if a sequence of the maximum length does not fit.
    """
    blocks = budget.left // limits.block_bytes - 1
    if blocks >= limits.min_num_blocks:
        return blocks
    missing = (limits.min_num_blocks + 1) * limits.block_bytes - budget.left
    tokens = max(0, blocks) // limits.num_groups * limits.block_size
    hints = []
    if tokens:
        hints.append(f"--max-model-len {tokens}")
    if budget.utilization < 0.95:
        hints.append(f"--gpu-memory-utilization above {budget.utilization:g}")
    hints.append(
        "a smaller --max-num-seqs or --chunked-prefill-size (they determine the memory of a step)"
    )
    raise CapacityError(
        f"not enough memory for one sequence of the maximum length: {missing / GIB:.2f} GiB are missing. Of "
        f"{budget.total / GIB:.1f} GiB × {budget.utilization:g}, weights take {budget.weights / GIB:.2f}, a step "
        f"{budget.peak / GIB:.2f}, graphs and tables {budget.reserve / GIB:.2f}, other programs "
        f"{budget.others / GIB:.2f}; {max(0, budget.left) / GIB:.2f} are left. Try {', or '.join(hints)}."
    )


def blocks_of_host(limits: PoolLimits, available: int, wanted: int | None = None) -> int:
    """Return the number of blocks on a CPU: `wanted`, or a default.

    The default takes a quarter of the `available` bytes, at most 4 GiB, and at most what 256 sequences of the
    maximum length need. Raises CapacityError if no such sequence fits, or if `wanted` exceeds the available memory:
    the system would overcommit it, and kill the process on use.
    """
    if wanted is not None:
        if (wanted + 1) * limits.block_bytes > available:
            raise CapacityError(
                f"a KV cache of {wanted * limits.block_bytes / GIB:.2f} GiB does not fit: {available / GIB:.2f} GiB of "
                "memory are available. Lower or omit --max-total-tokens or --kv-cache-memory."
            )
        return wanted
    blocks = min(available // 4, _MAX_HOST_BYTES) // limits.block_bytes - 1
    if blocks < limits.min_num_blocks:
        needed = (limits.min_num_blocks + 1) * limits.block_bytes
        raise CapacityError(
            f"the KV cache needs {needed / GIB:.2f} GiB for one sequence of the maximum length, and its default size on "
            f"this CPU is {min(available // 4, _MAX_HOST_BYTES) / GIB:.2f} GiB. Set --kv-cache-memory {needed}, or "
            "lower --max-model-len."
        )
    return min(blocks, 256 * limits.min_num_blocks)
