"""Reads the part of a memory-mapped tensor that a process needs, and nothing else of its file.

Without advice, Linux reads ahead of the pages that are used, up to several megabytes on some disks. That would be parts
of other processes.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import product

import torch

# A smaller gap between two ranges is read: 1 MiB takes a disk less time than two requests in a row.
MIN_GAP = 1 << 20  # bytes
# For one call, Linux reads at least 128 KiB of a range, and may ignore the remainder.
_CHUNK = 128 << 10  # bytes


@contextmanager
def exact_pages(*views: torch.Tensor) -> Iterator[None]:
    """Read the pages of views of mapped tensors; until they are copied, read no others ahead.

    Does nothing for memory that is not mapped from a file, and where the system has no `madvise`.
    """
    madvise = _find_madvise()
    if madvise is None:
        yield
        return
    ranges = [
        _whole_pages(view.data_ptr() + start, size)
        for view in views
        if view.device.type == "cpu"
        for start, size in byte_ranges(view.shape, view.stride(), view.element_size())
    ]
    for start, size in ranges:
        madvise(start, size, mmap.MADV_RANDOM)
        for offset in range(0, size, _CHUNK):
            madvise(start + offset, min(_CHUNK, size - offset), mmap.MADV_WILLNEED)
    yield
    for start, size in ranges:
        madvise(start, size, mmap.MADV_NORMAL)


def byte_ranges(
    shape: Sequence[int], strides: Sequence[int], item_size: int, min_gap: int = MIN_GAP
) -> list[tuple[int, int]]:
    """Return the (start, size) of the ranges that hold a view's elements, in bytes from its first one.

    Ranges are in ascending order, and gaps of fewer than `min_gap` bytes are part of a range.
    """
    if 0 in shape:
        return []
    axes = sorted((stride * item_size, size) for stride, size in zip(strides, shape, strict=True))
    length, outer = item_size, []
    for stride, size in axes:
        if stride - length < min_gap:
            length += (size - 1) * stride
        else:
            outer.append([index * stride for index in range(size)])
    return [(sum(starts), length) for starts in product(*reversed(outer))]


def _whole_pages(start: int, size: int) -> tuple[int, int]:
    """Return the start and size of the pages that hold a range."""
    first = start - start % mmap.PAGESIZE
    return first, start + size - first


@cache
def _find_madvise() -> Callable[[int, int, int], int] | None:
    """Return the function of the C library, None if there is none."""
    if not hasattr(mmap, "MADV_WILLNEED"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    call: Callable[[int, int, int], int] = function
    return call
