"""Measures how long an event loop is kept from its next turn, in CPU time, so that a busy machine changes nothing."""

from __future__ import annotations

import asyncio
import mmap
import struct
import time
from pathlib import Path

BEAT_SECONDS = 0.002


class StallMeter:
    """The longest CPU time that a process has spent between two turns of its event loop, in a shared file.

    All threads count: one that holds the interpreter's lock delays the loop as a slow callback does. A thread that
    does not hold it lets the loop go on, so each of its turns counts little.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, which must have 8 bytes."""
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8)

    @property
    def seconds(self) -> float:
        """The longest stall since the last `reset`."""
        found: tuple[float] = struct.unpack("d", self._memory[:])
        return found[0]

    def reset(self) -> None:
        """Forget the stalls so far."""
        self._memory[:] = struct.pack("d", 0.0)

    async def run(self) -> None:
        """Measure the running loop until cancelled."""
        loop, before = asyncio.get_running_loop(), time.process_time()
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            now = time.process_time()
            if now - before > self.seconds:
                self._memory[:] = struct.pack("d", now - before)
            before = now
            assert loop.is_running()
