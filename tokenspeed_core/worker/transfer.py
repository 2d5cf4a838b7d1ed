"""Copies between host and device: many arrays in one copy, without waiting, two steps in flight.

On the CPU both sides are the same memory and nothing is copied to it. On CUDA every copy goes through
pinned buffers that rotate; a buffer is written again only when the copy that used it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from tokenspeed_core.api.step import I32

_ALIGNMENT = 16
_DEPTH = 4  # two steps in flight, each with a plan and other inputs
# Bytes. The ids of the largest step fit: --max-num-seqs decodes and a bucket's chunks.
_SMALLEST = 1 << 16


Fetch = Callable[[], list[np.ndarray[Any, Any]]]
"""Waits for a copy to the host and returns its arrays, which belong to the caller."""


class HostTransfer:
    """The transfer for the CPU: both sides are the same memory."""

    def send(self, arrays: Sequence[np.ndarray[Any, Any]]) -> list[torch.Tensor]:
        """Return tensors that share the arrays' memory (read-only ones, such as the wire's, are copied)."""
        return [
            torch.from_numpy(array if array.flags.writeable else array.copy()) for array in arrays
        ]

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetch:
        """Copy now."""
        arrays = [tensor.numpy().copy() for tensor in tensors]
        return lambda: arrays

    def fetch_ids(self, ids: torch.Tensor) -> Fetch:
        """Copy now."""
        return self.fetch((ids,))


class PinnedRing:
    """Pinned host buffers in rotation, each guarded by an event on the stream that reads or writes it."""

    def __init__(self, num_bytes: int, depth: int = _DEPTH) -> None:
        """Allocate `depth` buffers of `num_bytes`."""
        self._views: list[dict[int, tuple[torch.Tensor, I32]]] = [{} for _ in range(depth)]
        self._tensors = [
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(depth)
        ]
        self._arrays = [tensor.numpy() for tensor in self._tensors]
        self._events = [torch.cuda.Event() for _ in range(depth)]  # type: ignore[no-untyped-call]
        self._next = 0

    def take(self, num_bytes: int) -> tuple[torch.Tensor, np.ndarray[Any, Any], torch.cuda.Event]:
        """Return a buffer that no copy uses, its bytes as an array, and the event to record after the copy.

        Grows the buffer where it is too small, which waits for the device.
        """
        index = self._turn()
        if len(self._arrays[index]) < num_bytes:
            self._tensors[index] = torch.empty(2 * num_bytes, dtype=torch.uint8, pin_memory=True)
            self._arrays[index] = self._tensors[index].numpy()
            self._views[index].clear()
        return self._tensors[index], self._arrays[index], self._events[index]

    def take_ids(self, count: int) -> tuple[torch.Tensor, I32, torch.cuda.Event]:
        """Like `take`, for int32 [count] and with cached views: a decode step fetches nothing else."""
        index = self._turn()
        views = self._views[index]
        if count not in views:
            part = self._tensors[index][: 4 * count].view(torch.int32)
            views[count] = (part, part.numpy())
        return *views[count], self._events[index]

    def _turn(self) -> int:
        index = self._next
        self._next = (index + 1) % len(self._tensors)
        self._events[index].synchronize()
        return index


class CudaTransfer:
    """The transfer to a CUDA device over a stream, which must be current at every call."""

    def __init__(self, stream: torch.cuda.Stream, num_bytes: int = _SMALLEST) -> None:
        """Allocate pinned buffers for uploads of `num_bytes`. They grow for larger uploads."""
        self._stream = stream
        self._device = stream.device
        self._up = PinnedRing(num_bytes)
        self._down = PinnedRing(_SMALLEST, depth=2 * _DEPTH)

    def send(self, arrays: Sequence[np.ndarray[Any, Any]]) -> list[torch.Tensor]:
        """Copy all arrays into one new device buffer in a single transfer, and return its parts."""
        offsets, total = _offsets([array.nbytes for array in arrays])
        pinned, host, event = self._up.take(total)
        for array, offset in zip(arrays, offsets, strict=True):
            host[offset : offset + array.nbytes] = (
                np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            )
        buffer = torch.empty(total, dtype=torch.uint8, device=self._device)
        buffer.copy_(pinned[:total], non_blocking=True)
        event.record(self._stream)
        return [
            buffer[offset : offset + array.nbytes].view(_TORCH[array.dtype.name]).view(array.shape)
            for array, offset in zip(arrays, offsets, strict=True)
        ]

    def fetch_ids(self, ids: torch.Tensor) -> Fetch:
        """Start to copy int32 [R] in as few calls as possible."""
        pinned, host, event = self._down.take_ids(len(ids))
        pinned.copy_(ids, non_blocking=True)
        event.record(self._stream)
        return partial(_wait, event, [(host, "int32", host.shape)])

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetch:
        """Start the copies and record an event after them."""
        offsets, total = _offsets([tensor.numel() * tensor.element_size() for tensor in tensors])
        pinned, host, event = self._down.take(total)
        parts = []
        for tensor, offset in zip(tensors, offsets, strict=True):
            end = offset + tensor.numel() * tensor.element_size()
            pinned[offset:end].view(tensor.dtype).copy_(tensor.reshape(-1), non_blocking=True)
            parts.append((host[offset:end], _NUMPY[tensor.dtype], tuple(tensor.shape)))
        event.record(self._stream)
        return partial(_wait, event, parts)


HostDeviceTransfer = HostTransfer | CudaTransfer
"""Copies to one device and back."""


def _wait(
    event: torch.cuda.Event, parts: list[tuple[np.ndarray[Any, Any], str, tuple[int, ...]]]
) -> list[np.ndarray[Any, Any]]:
    event.synchronize()
    return [part.view(dtype).reshape(shape).copy() for part, dtype, shape in parts]


_TORCH = {
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "bool": torch.bool,
    "uint8": torch.uint8,
}
_NUMPY = {dtype: name for name, dtype in _TORCH.items()}


def _offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the aligned offsets of parts of these sizes in one buffer, and the buffer's size."""
    *offsets, total = accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)
    return offsets, max(total, _ALIGNMENT)
