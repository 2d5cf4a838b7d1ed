"""Memory around a kernel's arguments: a kernel may not write there, and what it reads there may not matter."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_GUARD = 1024  # bytes before and after what is copied, which keep its alignment


@dataclass(frozen=True, slots=True, eq=False)
class Guard:
    """A stretch of memory that some arguments are in: its bytes, those it had, and by argument which it covers."""

    memory: Tensor  # uint8 [elements, bytes of one]
    before: Tensor
    covered: Mapping[str, Tensor]  # bool [elements]

    def check(self, case: str, mutates: Collection[str]) -> None:
        """Raise AssertionError, naming what was written to, where a byte changed that `mutates` does not cover."""
        changed = (self.memory != self.before).any(dim=1)
        for name, mask in self.covered.items():
            assert name in mutates or not changed[mask].any(), f"{case}: it wrote into {name}"
            changed &= ~mask
        assert not changed.any(), f"{case}: it wrote beyond {' and '.join(self.covered)}"


def guarded(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Guard, ...]]:
    """Return arguments of the same values and strides in longer memory, with the guards of that.

    All that no argument covers is NaN, and of integers the largest. Those that share memory share it again.
    """
    given, guards = dict(arguments), []
    shared: dict[tuple[int, torch.dtype], list[str]] = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.numel():
            shared.setdefault((value.untyped_storage().data_ptr(), value.dtype), []).append(name)
    for names in shared.values():
        views, guard = _moved({name: arguments[name] for name in names})
        given |= views
        guards.append(guard)
    return given, tuple(guards)


def is_shared(one: Tensor, other: Any) -> bool:
    """Say whether two tensors are in the same memory; nothing is where there are no elements."""
    has_both = isinstance(other, Tensor) and one.numel() and other.numel()
    return bool(has_both and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr())


def _moved(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Guard]:
    """Copy tensors of one type and one stretch of memory to the middle of a longer one."""
    first = next(iter(tensors.values()))
    size = first.element_size()
    old = torch.empty(0, dtype=first.dtype, device=first.device).set_(first.untyped_storage())
    room = _GUARD // size
    memory = torch.full(
        (len(old) + 2 * room,), _poison(first.dtype), dtype=first.dtype, device=first.device
    )
    covered: dict[str, Tensor] = {}
    for name, each in tensors.items():
        covered[name] = torch.zeros(len(memory), dtype=torch.bool, device=first.device)
        covered[name].as_strided(each.shape, each.stride(), each.storage_offset() + room).fill_(
            True
        )
    taken = torch.stack(list(covered.values())).any(dim=0)
    raw = memory.view(torch.uint8).view(-1, size)  # torch moves no eight-bit floats by a mask
    raw[taken] = old.view(torch.uint8).view(-1, size)[taken[room : room + len(old)]]
    views = {
        name: memory.as_strided(each.shape, each.stride(), each.storage_offset() + room)
        for name, each in tensors.items()
    }
    return views, Guard(raw, raw.clone(), covered)


def _poison(dtype: torch.dtype) -> float:
    if dtype == torch.bool:
        return True
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
