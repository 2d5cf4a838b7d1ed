"""The weight map: which tensor of a checkpoint fills which part of which parameter, and how it would be cut.

Loading streams: one tensor is looked up, checked, copied and dropped before the next is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

_READABLE = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))
# Tables that old checkpoints store and every model computes for itself; scales of an fp8 KV cache, which is chosen
# by --kv-cache-dtype and not by the checkpoint.
_UNREAD = ("rotary_emb.inv_freq", "k_scale", "v_scale")
_MAX_NAMES = 12  # beyond this many, an error names patterns with their counts


@dataclass(frozen=True, slots=True)
class Shard:
    """How a weight is cut over a process group.

    `axis` is the axis of the checkpoint's tensor. Where it counts whole heads, `num_heads` says how many;
    fewer heads than processes means that neighbouring processes hold copies of one head.
    """

    axis: int
    group: str
    num_heads: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """How a weight gets into a parameter that holds it in another form: `store` takes it, in `dtype`, on the device.

    A checkpoint may hold the weight in that form already, the type of its slot's target. Then it is copied, and
    `scale`, which belongs to it alone, is filled from the tensor called `scale_name`.
    """

    dtype: torch.dtype
    store: Callable[[torch.Tensor], None]
    scale: torch.Tensor
    scale_name: str


@dataclass(frozen=True, slots=True, eq=False)
class WeightSlot:
    """One tensor of a checkpoint and the view of a parameter that it fills; both have the same shape.

    `shard` None means that every process holds the whole. `kind` is "matrix", "bias", "norm", or "codes" and "scale"
    of a weight that must come quantised. A slot that `replaces` others is another form of them: a checkpoint holds
    either it or them. Without a `packing` the tensor is copied, or given to `take` where there is one; `settle` is
    called once all tensors are read, for whatever slots have it.
    """

    name: str
    target: torch.Tensor
    shard: Shard | None
    kind: str = "matrix"
    replaces: tuple[str, ...] = ()
    packing: Packing | None = None
    take: Callable[[torch.Tensor], None] | None = None
    settle: Callable[[], None] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The type in which the tensor is taken."""
        return self.target.dtype if self.packing is None else self.packing.dtype

    def fill(self, tensor: torch.Tensor) -> None:
        """Put a tensor of the slot's shape in its place, whatever its device and float type."""
        if self.take is not None:
            self.take(tensor)
        elif self.packing is None or tensor.dtype == self.target.dtype:
            self.target.copy_(tensor)
        else:
            self.packing.store(tensor.to(self.target.device, self.packing.dtype))

    def complaint(self, tensor: torch.Tensor) -> str:
        """Return what is wrong with a tensor for this slot, or "". A single scale may come with or without an axis."""
        shape, needed = tensor.shape, self.target.shape
        if shape != needed and not (self.kind == "scale" and shape.numel() == needed.numel() == 1):
            return f"{self.name} has shape {list(shape)} and needs {list(needed)}"
        if tensor.dtype == self.target.dtype or (
            tensor.dtype in _READABLE and self.dtype in _READABLE
        ):
            return ""
        if self.dtype in _READABLE:
            return f"{self.name} is {tensor.dtype}; only unquantised weights are supported"
        return f"{self.name} is {tensor.dtype} and needs {self.target.dtype}"


@dataclass(slots=True)
class _Faults:
    """What a load found wrong so far."""

    missing: list[str] = field(default_factory=list)
    surplus: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)

    def message(self) -> str:
        """Return all faults in one line, empty if there are none."""
        kinds = (
            ("missing", self.missing),
            ("not expected", self.surplus),
            ("given twice", self.repeated),
        )
        parts = [f"{kind}: {', '.join(_listing(names))}" for kind, names in kinds if names]
        if self.misshapen:
            parts.append("; ".join(_listing(self.misshapen)))
        return "; ".join(parts)


class _Scales:
    """The scales of weights that a checkpoint holds packed: each such weight has one, and no other has."""

    def __init__(self, packings: Mapping[str, Packing]) -> None:
        self._packings = packings
        self._needed: dict[str, None] = {}
        self._given: dict[str, None] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._packings

    def need(self, packing: Packing) -> None:
        """Note that a weight came packed."""
        self._needed[packing.scale_name] = None

    def fill(self, name: str, tensor: torch.Tensor, faults: _Faults) -> None:
        """Copy a scale to its place, or note what is wrong with it. Of one a row, the last axis may be left out."""
        if name in self._given:
            faults.repeated.append(name)
            return
        self._given[name] = None
        target = self._packings[name].scale
        if tensor.shape != target.shape and not (
            target.shape[1] == 1 and tensor.shape == target.shape[:1]
        ):
            shapes = f"{list(tensor.shape)} and needs {list(target.shape)}"
            faults.misshapen.append(f"{name} has shape {shapes}")
        elif target.dtype not in _READABLE and tensor.dtype != target.dtype:
            faults.misshapen.append(f"{name} is {tensor.dtype} and needs {target.dtype}")
        elif target.dtype in _READABLE and tensor.dtype not in _READABLE:
            faults.misshapen.append(
                f"{name} is {tensor.dtype}; only scales of 16 bits or more are supported"
            )
        else:
            target.copy_(tensor.view(target.shape))

    def missing(self) -> list[str]:
        """Return the scales that packed weights lack."""
        return [name for name in self._needed if name not in self._given]

    def surplus(self) -> list[str]:
        """Return the scales of weights that came whole, and so have new ones."""
        return [name for name in self._given if name not in self._needed]


class WeightMap:
    """All slots of a model, by checkpoint name.

    `ignored` are names that may stand in a checkpoint without being read. Raises ValueError on two slots
    of one name.
    """

    def __init__(self, slots: Iterable[WeightSlot], ignored: Iterable[str] = ()) -> None:
        self._slots: dict[str, WeightSlot] = {}
        self._ignored = (*_UNREAD, *ignored)
        for slot in slots:
            if slot.name in self._slots:
                raise ValueError(f"the weight map has two slots for {slot.name}")
            self._slots[slot.name] = slot
        self._packings = {
            slot.packing.scale_name: slot.packing
            for slot in self._slots.values()
            if slot.packing is not None
        }

    def __iter__(self) -> Iterator[WeightSlot]:
        """Iterate over the slots of one complete checkpoint, without other forms of the same weights."""
        return (slot for slot in self._slots.values() if not slot.replaces)

    def _is_ignored(self, name: str) -> bool:
        return any(name == known or name.endswith(f".{known}") for known in self._ignored)

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors into their slots, casting to the parameter's dtype.

        Raises ValueError naming every missing, surplus, repeated or misshapen weight, after reading all.
        """
        pending = {slot.name: None for slot in self}
        faults, seen, scales = _Faults(), set(), _Scales(self._packings)
        for name, tensor in weights:
            slot = self._slots.get(name)
            if slot is None:
                if name in scales:
                    scales.fill(name, tensor, faults)
                elif not self._is_ignored(name):
                    faults.surplus.append(name)
                continue
            filled = slot.replaces or (name,)
            if name in seen or any(part not in pending for part in filled):
                faults.repeated.append(name)
                continue
            seen.add(name)
            for part in filled:
                del pending[part]
            is_packed = slot.packing is not None and tensor.dtype == slot.target.dtype
            if slot.packing is not None and is_packed:
                scales.need(slot.packing)
            complaint = slot.complaint(tensor)
            if complaint:
                faults.misshapen.append(complaint)
            else:
                slot.fill(tensor)
        faults.missing.extend([*pending, *scales.missing()])
        faults.surplus.extend(scales.surplus())
        message = faults.message()
        if message:
            raise ValueError(
                f"the checkpoint's weights are not those its config.json describes; {message}; correct config.json, "
                "or copy or download the checkpoint again"
            )
        for settle in dict.fromkeys(slot.settle for slot in self if slot.settle is not None):
            settle()


def _listing(names: list[str]) -> list[str]:
    """Return the names, or where they are many, their patterns (numbers as *) with counts."""
    if len(names) <= _MAX_NAMES:
        return names
    counts: dict[str, int] = {}
    for name in names:
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        counts[pattern] = counts.get(pattern, 0) + 1
    return [
        pattern if count == 1 else f"{pattern} ({count} of them)"
        for pattern, count in counts.items()
    ]
