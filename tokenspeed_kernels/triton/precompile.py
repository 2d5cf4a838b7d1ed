"""Compile Triton kernels in background threads before their first launch.

A factory that builds a kernel knows its shapes and dtypes. It calls `compile_for` with its launch function and blank
tensors: every kernel that the function would launch is compiled in the background instead. The first real launch
takes the compiled kernel, waits for a compilation in progress, or compiles the kernel itself if no thread has begun.
Compiler errors are raised at that launch. Triton holds the GIL for about an eighth of a compilation, so threads help.

This relies on Triton internals: `_Kernel` subclasses `JITFunction` and overrides its private `_do_compile`, and it
builds the launcher through `driver.active.launcher_cls`; `_load_separately` replaces a private function. Triton has no
public way to compile for given arguments in another thread; without this module, a start compiles one kernel after
another, or a request waits for the compiler. Check this module, and run tests/gpu/test_precompile.py, whenever Triton
is updated.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from heapq import heappop, heappush
from itertools import count
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime import build
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

Compile = Callable[[], Any]

SWITCH_INTERVAL = 0.0002  # seconds until a waiting thread gets the GIL, while threads compile

_IS_PRECOMPILING: ContextVar[bool] = ContextVar("is_precompiling", default=False)


def compile_for(launch: Callable[..., object], *arguments: Any) -> None:
    """Compile every kernel that `launch(*arguments)` would launch; only kernels decorated with `jit` here count.

    Launches nothing. Tensors may be `blank`: Triton specializes on dtypes, on integers that are 1 or multiples of 16,
    and on alignment. Does nothing without a CUDA device, under the interpreter, or with a single CPU.
    """
    if not is_possible():
        return
    before = _IS_PRECOMPILING.set(True)
    try:
        launch(*arguments)
    finally:
        _IS_PRECOMPILING.reset(before)


def blank(dtype: str, *shape: int) -> Tensor:
    """Return a meta tensor in place of an aligned device tensor.

    Launch functions must allocate from it with `new_empty`: `empty_like` would import Python modules for a second.
    """
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def is_possible() -> bool:
    """Return whether kernels can be compiled in the background here."""
    return torch.cuda.is_available() and not triton.knobs.runtime.interpret and num_processors() > 1


def num_processors() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorate a kernel like `triton.jit`, and let `compile_for` compile it."""
    if function is None:
        return partial(jit, **options)
    if triton.knobs.runtime.interpret:
        return triton.jit(function, **options)
    return _Kernel(function, **options)


def source_length(kernel: JITFunction) -> int:
    """Return the length of a kernel's source in characters, with each called function counted per call, as Triton inlines it."""
    scope = kernel.fn.__globals__
    called = {name: scope.get(name) for name in kernel.fn.__code__.co_names}
    return len(kernel.src) + sum(
        kernel.src.count(f"{name}(") * source_length(function)
        for name, function in called.items()
        if isinstance(function, JITFunction)
    )


def _load_separately(name: str, path: str) -> ModuleType:
    """Load a C launcher in place of `triton.runtime.build._load_module_from_path`, as a module of its own.

    Triton 3.6 loads all launchers by one module name. If a launcher is loaded again, CPython returns the module that
    was loaded last under this name, and overwrites its functions. Another thread may be about to read them.
    """
    return _load_module(f"load_{next(_LOADS)}.{name}", path)


_LOADS = count()
_load_module, build._load_module_from_path = build._load_module_from_path, _load_separately


class _Kernel(JITFunction):  # type: ignore[misc]
    """A kernel that is compiled by a background thread, and not launched, inside `compile_for`."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__(function, **options)
        # Compilations by (cache key, device). An entry is removed at the first launch.
        self._pending: dict[tuple[str, int], _Once] = {}
        self._lock = threading.Lock()

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return partial(self.run, grid=grid, warmup=_IS_PRECOMPILING.get())

    def _do_compile(self, key: str, signature: Any, device: int, *others: Any) -> Any:
        """Compile the specialization `key`, or queue it inside `compile_for`. Triton stops there if this is None."""
        compile_now = partial(super()._do_compile, key, signature, device, *others)
        if not _IS_PRECOMPILING.get():
            return self._pending.pop((key, device), compile_now)()
        if (key, device) not in self._pending:
            self._pending[key, device] = once = _Once(compile_now)
            _THREADS.put(source_length(self), partial(self._compile_with_launcher, once))
        return None

    def _compile_with_launcher(self, once: Compile) -> None:
        """Compile the kernel and its C launcher, which Triton caches on disk.

        Specializations of one kernel share a launcher, hence the lock.
        """
        kernel = once()
        with self._lock:
            driver.active.launcher_cls(kernel.src, kernel.metadata)


class _Once:
    """Compile a kernel once: the first caller compiles, others wait. After a failure the next caller tries again."""

    def __init__(self, compile_now: Compile) -> None:
        self._compile = compile_now
        self._lock = threading.Lock()
        self._kernel: Any = None

    def __call__(self) -> Any:
        with self._lock:
            if self._kernel is None:
                self._kernel = self._compile()
            return self._kernel


class _Threads:
    """Background threads, at most one less than there are CPUs. The largest task goes first; idle threads end.

    While there are any, a thread that wants the GIL gets it after SWITCH_INTERVAL. The main thread releases it for
    each launch and each tensor, and would often wait for Python's 5 ms to have it back.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, Compile]] = []
        self._num_put = 0
        self._num_threads = 0
        self._usual_interval = 0.0
        self._lock = threading.Lock()

    def put(self, size: int, task: Compile) -> None:
        """Queue a task. Its exceptions are dropped."""
        with self._lock:
            heappush(self._waiting, (-size, self._num_put, task))
            self._num_put += 1
            if self._num_threads == num_processors() - 1:
                return
            if self._num_threads == 0:
                self._usual_interval = sys.getswitchinterval()
                sys.setswitchinterval(SWITCH_INTERVAL)
            self._num_threads += 1
        threading.Thread(target=self._work, name="precompile").start()

    def _work(self) -> None:
        while (task := self._take()) is not None:
            with suppress(Exception):  # raised again by the launch
                task()

    def _take(self) -> Compile | None:
        with self._lock:
            # After the main thread ended, no queued kernel will be launched.
            if self._waiting and threading.main_thread().is_alive():
                return heappop(self._waiting)[2]
            self._num_threads -= 1
            if self._num_threads == 0:
                sys.setswitchinterval(self._usual_interval)
            return None


# One pool per process, as Triton's kernels are module globals.
_THREADS = _Threads()
