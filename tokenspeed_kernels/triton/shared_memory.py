"""The shared memory of the device's multiprocessors."""

from __future__ import annotations

import torch

_DRIVER_BYTES = 1024  # of each multiprocessor, which programs cannot use


def shared_memory() -> int | None:
    """Return the bytes that a program may use, None without a device. Call once, when binding a kernel."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties().shared_memory_per_multiprocessor - _DRIVER_BYTES
