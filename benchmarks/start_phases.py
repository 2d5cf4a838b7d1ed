"""The phases of a start: wall time, CPU time of the main thread, and the kernels that background threads compile."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import psutil
import triton


@dataclass(frozen=True, slots=True)
class _Compilation:
    """A compiled kernel: its name, whether a background thread compiled it, its end and its length in seconds."""

    name: str
    is_background: bool
    end: float
    seconds: float


class StartPhases:
    """Takes the time of each phase. `progress` is the callback of the worker's `build`.

    The main thread's CPU time is below the wall time where it waits: for the device, for a compilation, or for the
    interpreter's lock, which background compilations hold at times.
    """

    def __init__(self) -> None:
        """Note all compilations. The first phase, the imports, began with the process."""
        age: float = time.time() - psutil.Process().create_time()
        self._begin = time.perf_counter() - age
        self._phases: list[tuple[str, float, float]] = [("imports", self._begin, 0.0)]
        self._compilations: list[_Compilation] = []
        triton.knobs.compilation.listener = self._note

    @property
    def seconds(self) -> float:
        """The time since the imports began."""
        return self._phases[-1][1] - self._begin

    def begin(self, name: str) -> None:
        """Begin the next phase, unless it is already running."""
        if self._phases[-1][0] != name:
            self._phases.append((name, time.perf_counter(), time.thread_time()))

    def end(self) -> None:
        """End the last phase."""
        self.begin("")

    def progress(self, what: str, done: int, total: int) -> None:
        """Begin a phase that is reported, or the unnamed one after it."""
        self.begin(f"after {what}" if done >= total else what)

    def report(self) -> None:
        """Print the phases, then the compilations that took longest."""
        for (name, start, cpu), (_, end, cpu_end) in zip(
            self._phases, self._phases[1:], strict=False
        ):
            print(
                f"{start - self._begin:6.2f} s  {name:24} {end - start:6.2f} s, main thread {cpu_end - cpu:6.2f} s"
            )
        found = sorted(self._compilations, key=lambda each: -each.seconds)
        background = [each for each in found if each.is_background]
        print(
            f"{len(background)} kernels compiled in the background, {sum(each.seconds for each in background):.1f} s in "
            f"all, the last at {max((each.end for each in background), default=0):.1f} s; "
            f"{len(found) - len(background)} by the main thread, "
            f"{sum(each.seconds for each in found if not each.is_background):.1f} s"
        )
        for each in found[:16]:
            where = "background" if each.is_background else "main"
            print(f"  {each.seconds:6.2f} s until {each.end:6.2f} s  {where:10} {each.name}")

    def _note(self, *, metadata: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            is_background = threading.current_thread() is not threading.main_thread()
            end = time.perf_counter() - self._begin
            name = str(metadata["name"])
            self._compilations.append(_Compilation(name, is_background, end, times.total / 1e6))
