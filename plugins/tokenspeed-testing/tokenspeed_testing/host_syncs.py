"""Detection of host-device synchronization on the CPU.

A call that synchronizes cannot be captured in a CUDA graph. Only calls of torch functions are seen,
not those of compiled code.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_WAITS = frozenset(
    {
        "__array__",
        "__bool__",
        "__complex__",
        "__contains__",
        "__float__",
        "__index__",
        "__int__",
        "allclose",
        "bincount",
        "cpu",
        "equal",
        "is_nonzero",
        "item",
        "masked_select",
        "nonzero",
        "numpy",
        "tolist",
        "unique",
        "unique_consecutive",
    }
)
"""Functions of torch and tensor methods that wait for the device to return a result or its shape."""


@contextmanager
def without_host_syncs(case: str) -> Iterator[None]:
    """Raise AssertionError naming the lines that read tensor values on the host."""
    with _Watch() as watch:
        yield
    assert not watch.seen, (
        f"{case}: the kernel declares graph_safe, but reads device values on the host: "
        f"{', '.join(dict.fromkeys(watch.seen))}. Waiting for the device is not allowed during a capture. Keep the values on the device. "
        "If only the CPU needs them, write a separate spec for cpu."
    )


class _Watch(TorchFunctionMode):
    """Records each synchronizing call with its source line."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name in _WAITS or _has_unknown_shape(name, args, given):
            self.seen.append(f"{name} at {_line()}")
        return func(*args, **given)


def _has_unknown_shape(name: str, args: Sequence[Any], given: Mapping[str, Any]) -> bool:
    """Return whether the shape of a result depends on tensor values."""
    if name == "where":
        return len(args) == 1 and not given
    if name == "repeat_interleave":
        return any(isinstance(each, Tensor) for each in args[1:]) and "output_size" not in given
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(each, Tensor) and each.dtype == torch.bool for each in index)
    return False


def _line() -> str:
    """Return the file and line of the caller outside torch."""
    torchs = Path(torch.__file__).parent
    frames = [
        each for each in traceback.extract_stack() if torchs not in Path(each.filename).parents
    ]
    last = [each for each in frames if each.filename != __file__][-1]
    return f"{Path(last.filename).name}:{last.lineno}"
