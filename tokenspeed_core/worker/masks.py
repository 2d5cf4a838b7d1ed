"""Uploads the masks of a step, which say which tokens each row may choose.

The host fills a mask while the forward of its step runs. On CUDA, the mask is copied on a separate stream, so that the
copy also overlaps with the forward, and sampling finds the mask on the device.
"""

from __future__ import annotations

import numpy as np
import torch

from tokenspeed_core.api.step import I32, I64
from tokenspeed_core.worker.transfer import HostTransfer, PinnedRing


class HostMasks:
    """The masks on the CPU: both sides are the same memory."""

    def __init__(self, shape: tuple[int, int]) -> None:
        """Prepare for masks of at most `shape`, int32 [S, W]."""
        self._shape = shape
        self._transfer = HostTransfer()

    def buffer(self) -> I32:
        """Return zeros, int32 [S, W]."""
        return np.zeros(self._shape, np.int32)

    def upload(self, places: I64, words: I32) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tensors that share the arrays' memory, as `HostTransfer.send` does."""
        device_places, device_words = self._transfer.send((places, words))
        return device_places, device_words

    def release(self) -> None:
        """Do nothing: nothing is copied."""


class CudaMasks:
    """The masks on a CUDA device: one buffer that every step with masks reuses.

    The upload of a step waits for the kernel that read the mask of the step before, and `stream`, which must be current
    at every call, waits for the upload.
    """

    def __init__(self, stream: torch.cuda.Stream, shape: tuple[int, int]) -> None:
        """Allocate device memory for masks of at most `shape`, int32 [S, W]."""
        self._stream = stream
        self._copies = torch.cuda.Stream(stream.device)  # type: ignore[no-untyped-call]
        self._is_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._is_read = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._shape = shape
        self._places = torch.empty(shape[0], dtype=torch.int64, device=stream.device)
        self._words = torch.empty(shape, dtype=torch.int32, device=stream.device)
        self._ring = PinnedRing(8 * shape[0])
        self._pinned: tuple[int, torch.Tensor] | None = None  # the buffer, and its address

    def buffer(self) -> I32:
        """Return pinned memory, int32 [S, W]. Its owner writes it again only after the step was collected."""
        tensor = torch.zeros(self._shape, dtype=torch.int32, pin_memory=True)
        array: I32 = tensor.numpy()
        self._pinned = (array.ctypes.data, tensor)
        return array

    def upload(self, places: I64, words: I32) -> tuple[torch.Tensor, torch.Tensor]:
        """Start to copy places [R] and words [R, W]. Returns the device's copies, valid until `release`.

        `words` are the first rows of `buffer`, or any other array, which is copied to pinned memory first.
        """
        num_rows = len(words)
        device_places, device_words = self._places[:num_rows], self._words[:num_rows]
        torch.cuda.set_stream(self._copies)
        try:
            self._copies.wait_event(self._is_read)
            self._copy(device_places, places)
            if self._pinned is not None and words.ctypes.data == self._pinned[0]:
                device_words.copy_(self._pinned[1][:num_rows], non_blocking=True)
            else:
                self._copy(device_words, words)
            self._is_copied.record(self._copies)
        finally:
            torch.cuda.set_stream(self._stream)
        self._stream.wait_event(self._is_copied)
        return device_places, device_words

    def release(self) -> None:
        """Let the next upload overwrite the mask, after the kernels launched so far."""
        self._is_read.record(self._stream)

    def _copy(self, target: torch.Tensor, array: I64 | I32) -> None:
        pinned, host, event = self._ring.take(array.nbytes)
        host[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        target.copy_(
            pinned[: array.nbytes].view(target.dtype).view(target.shape), non_blocking=True
        )
        event.record(self._copies)


Masks = HostMasks | CudaMasks
"""The masks on one device."""
