"""Kernels compiled before their first launch, side by side, by threads that end when nothing is left to compile.

Who makes a kernel knows what it will be launched with, and has the code that launches it run on blank tensors
(`compile_for`): what it would launch is compiled in the background instead. The first launch takes what stands
compiled, waits for what is being compiled and compiles by itself what nobody has begun; there too an error
of the compiler is raised. Triton holds Python's lock for an eighth of the time that it takes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from heapq import heappop, heappush
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

Compile = Callable[[], Any]

_IS_PRECOMPILING: ContextVar[bool] = ContextVar("is_ahead", default=False)  # in this thread


def compile_for(launch: Callable[..., object], *arguments: Any) -> None:
    """Have the kernels compiled that `launch(*arguments)` would launch, as far as they are of `jit`; it launches none.

    Tensors may be `blank`: what counts is what Triton specialises on, types, and which numbers are 1 or multiples of
    16. Does nothing without a CUDA device, under the interpreter, or where the process has but one processor.
    """
    if not is_possible():
        return
    before = _IS_PRECOMPILING.set(True)
    try:
        launch(*arguments)
    finally:
        _IS_PRECOMPILING.reset(before)


def blank(dtype: str, *shape: int) -> Tensor:
    """Return a tensor without memory, which stands for any that is aligned.

    Code that it is launched through makes others by `new_empty`; `empty_like` would import a second of torch's Python.
    """
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def is_possible() -> bool:
    """Say whether anything is compiled ahead here."""
    return torch.cuda.is_available() and not triton.knobs.runtime.interpret and num_processors() > 1


def num_processors() -> int:
    """Return how many processors the process may run on."""
    return len(os.sched_getaffinity(0))


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Do as `triton.jit` does, for a kernel that can be compiled ahead."""
    if function is None:
        return partial(jit, **options)
    return (
        triton.jit(function, **options)
        if triton.knobs.runtime.interpret
        else _Kernel(function, **options)
    )


class _Kernel(JITFunction):  # type: ignore[misc]
    """A kernel that inside of `compile_for` is not launched, and compiled by other threads."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__(function, **options)
        self._ahead: dict[tuple[str, int], _Once] = {}  # by key and device, until it is launched
        self._lock = threading.Lock()

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return partial(self.run, grid=grid, warmup=_IS_PRECOMPILING.get())

    def _do_compile(self, key: str, signature: Any, device: int, *others: Any) -> Any:
        """Compile what Triton found no kernel for under `key`. None makes it go no further."""
        compile_now = partial(super()._do_compile, key, signature, device, *others)
        if not _IS_PRECOMPILING.get():
            return self._ahead.pop((key, device), compile_now)()
        if (key, device) not in self._ahead:
            self._ahead[key, device] = once = _Once(compile_now)
            _THREADS.put(len(self.src), partial(self._compile_and_glue, once))
        return None

    def _compile_and_glue(self, once: Compile) -> None:
        """Compile, then have the C code compiled that calls the kernel, which Triton keeps on disk.

        Forms of a kernel have one such code between them.
        """
        kernel = once()
        with self._lock:
            driver.active.launcher_cls(kernel.src, kernel.metadata)


class _Once:
    """What compiles one kernel once, whoever calls first; the others wait for it. If it fails, the next one tries."""

    def __init__(self, compile_now: Compile) -> None:
        self._compile, self._lock, self._kernel = compile_now, threading.Lock(), None

    def __call__(self) -> Any:
        with self._lock:
            if self._kernel is None:
                self._kernel = self._compile()
            return self._kernel


class _Threads:
    """As many threads as there are processors beside the caller's, while something waits; the largest goes first."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, Compile]] = []
        self._num_put = self._num_threads = 0
        self._lock = threading.Lock()

    def put(self, size: int, task: Compile) -> None:
        """Have a task done, before all smaller ones. Whatever it raises is dropped."""
        with self._lock:
            heappush(self._waiting, (-size, self._num_put, task))
            self._num_put += 1
            if self._num_threads == num_processors() - 1:
                return
            self._num_threads += 1
        threading.Thread(target=self._work, name="precompile").start()

    def _work(self) -> None:
        while (task := self._take()) is not None:
            with suppress(Exception):  # the launch will raise it
                task()

    def _take(self) -> Compile | None:
        with self._lock:
            if self._waiting and threading.main_thread().is_alive():  # or nobody will launch
                return heappop(self._waiting)[2]
            self._num_threads -= 1
            return None


_THREADS = _Threads()  # one for the process, as are Triton's kernels
