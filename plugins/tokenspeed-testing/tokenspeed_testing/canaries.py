"""Canary memory around a kernel's arguments, to detect writes and reads outside of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_GUARD = 1024  # bytes before and after a copied tensor; keeps its alignment
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@dataclass(frozen=True, slots=True, eq=False)
class Canary:
    """Memory that holds some arguments: its bits, their former values, and the elements of each argument."""

    memory: Tensor  # integers [elements]
    before: Tensor
    covered: Mapping[str, Tensor]  # bool [elements]

    def check(self, case: str, mutates: Collection[str]) -> None:
        """Raise AssertionError if a byte outside the arguments in `mutates` changed."""
        changed = self.memory != self.before
        if not changed.any():
            return
        for name, mask in self.covered.items():
            is_changed = (changed & mask).any()
            assert name in mutates or not is_changed, f"{case}: it wrote into {name}"
            changed &= ~mask
        assert not changed.any(), f"{case}: it wrote beyond {' and '.join(self.covered)}"


def with_canaries(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Canary, ...]]:
    """Return the arguments in larger memory with the same values and strides, and the canaries.

    Memory outside the arguments is NaN, or the largest integer. Arguments that share memory share
    it again.
    """
    given, canaries = dict(arguments), []
    shared: dict[tuple[int, torch.dtype], list[str]] = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.numel():
            shared.setdefault((value.untyped_storage().data_ptr(), value.dtype), []).append(name)
    for names in shared.values():
        views, canary = _moved({name: arguments[name] for name in names})
        given |= views
        canaries.append(canary)
    return given, tuple(canaries)


def is_shared(one: Tensor, other: Any) -> bool:
    """Return whether two tensors share memory."""
    has_both = isinstance(other, Tensor) and one.numel() and other.numel()
    return bool(has_both and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr())


def _moved(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Canary]:
    """Copy tensors of one dtype and storage into the middle of larger memory."""
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
    # torch selects no eight-bit floats by a mask, and compares NaN unequal.
    raw, middle = memory.view(_INTEGERS[size]), slice(room, room + len(old))
    raw[middle] = torch.where(taken[middle], old.view(_INTEGERS[size]), raw[middle])
    views = {
        name: memory.as_strided(each.shape, each.stride(), each.storage_offset() + room)
        for name, each in tensors.items()
    }
    return views, Canary(raw, raw.clone(), covered)


def _poison(dtype: torch.dtype) -> float:
    if dtype == torch.bool:
        return True
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
