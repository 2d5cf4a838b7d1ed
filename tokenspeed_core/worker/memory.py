"""Computes the size of the KV arena from the memory that is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenspeed_core.api.cache_groups import CacheGroupSpec
from tokenspeed_core.errors import CapacityError
from tokenspeed_core.kv_cache.page_layout import PageLayout

_MAX_HOST_BYTES = 4 << 30
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """The pages of the KV cache. `min_num_pages` is for one sequence of the maximum length."""

    layout: PageLayout
    min_num_pages: int

    @classmethod
    def of(
        cls,
        groups: Sequence[CacheGroupSpec],
        block_size: int,
        dtype_bytes: int,
        max_model_len: int,
        max_chunk: int | None = None,
    ) -> PoolLimits:
        """Return the limits of a pool for a model's groups. `max_chunk` is the argument of `PageLayout.of`."""
        layout = PageLayout.of(groups, block_size, dtype_bytes, max_chunk)
        return cls(layout, layout.num_pages_of_sequence(max_model_len))

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.layout.page_bytes

    def pages_of_tokens(self, num_tokens: int) -> int:
        """Return the pages of a pool of `--max-total-tokens`."""
        return self.layout.num_pages(max(1, num_tokens))

    def pages_of_bytes(self, num_bytes: int, flag: str) -> int:
        """Return how many pages fit into `num_bytes`, in addition to the padding page.

        Raises CapacityError if none does.
        """
        pages = num_bytes // self.page_bytes - 1
        if pages < 1:
            raise CapacityError(
                f"{flag} {num_bytes} is too small: a page of the KV cache takes {self.page_bytes} bytes, and one page is "
                f"reserved for padding. Use at least {flag} {2 * self.page_bytes}."
            )
        return pages


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


def pages_of_device(limits: PoolLimits, budget: DeviceBudget) -> int:
    """Return how many pages fill a device's budget.

    Raises CapacityError, with the missing memory, if a sequence of the maximum length does not fit.
    """
    pages = budget.left // limits.page_bytes - 1
    if pages >= limits.min_num_pages:
        return pages
    missing = (limits.min_num_pages + 1) * limits.page_bytes - budget.left
    tokens = limits.layout.max_sequence_len(max(0, pages))
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


def pages_of_host(limits: PoolLimits, available: int, wanted: int | None = None) -> int:
    """Return the number of pages on a CPU: `wanted`, or a default.

    The default is the smallest of a quarter of the `available` bytes, 4 GiB, and the size for 256 sequences of the
    maximum length. Raises CapacityError if no such sequence fits, or if `wanted` exceeds the available memory: the
    system would overcommit it, and kill the process on use.
    """
    if wanted is not None:
        if (wanted + 1) * limits.page_bytes > available:
            raise CapacityError(
                f"a KV cache of {wanted * limits.page_bytes / GIB:.2f} GiB does not fit: {available / GIB:.2f} GiB of "
                "memory are available. Lower or omit --max-total-tokens or --kv-cache-memory."
            )
        return wanted
    pages = min(available // 4, _MAX_HOST_BYTES) // limits.page_bytes - 1
    if pages < limits.min_num_pages:
        needed = (limits.min_num_pages + 1) * limits.page_bytes
        raise CapacityError(
            f"the KV cache needs {needed / GIB:.2f} GiB for one sequence of the maximum length, and its default size on "
            f"this CPU is {min(available // 4, _MAX_HOST_BYTES) / GIB:.2f} GiB. Set --kv-cache-memory {needed}, or "
            "lower --max-model-len."
        )
    return min(pages, 256 * limits.min_num_pages)
