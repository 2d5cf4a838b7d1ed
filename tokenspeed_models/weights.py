"""The weight map: which tensor of a checkpoint fills which part of which parameter, and how it is sharded.

Loading streams: each tensor is looked up, checked, copied and dropped before the next one is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch

from tokenspeed_core.api import ONE_PROCESS, ProcessGroup
from tokenspeed_models.loading.pages import exact_pages

Groups = Callable[[str], ProcessGroup]
"""Returns a process group by its name, such as `BuildContext.group`."""

_FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))
# Old checkpoints store the rotary table, which models compute. Scales of an FP8 KV cache are read elsewhere, if
# --kv-cache-dtype selects this cache.
_IGNORED = (
    "rotary_emb.inv_freq",
    "k_scale",
    "v_scale",
    "kv_scale",
    "k_proj.output_scale",
    "v_proj.output_scale",
)
_MAX_NAMES = 12  # longer lists are grouped into patterns in error messages


@dataclass(frozen=True, slots=True)
class Shard:
    """How a weight is sharded over a process group.

    `axis` is the axis of the checkpoint's tensor. If it consists of whole heads, `num_heads` is their number; with
    fewer heads than processes, neighboring processes hold copies of the same head. With `num_rows` the axis has that
    size and is padded to a multiple of the processes: the last ones hold fewer rows.
    """

    axis: int
    group: str
    num_heads: int | None = None
    num_rows: int | None = None

    def _num_slices(self, group: ProcessGroup) -> int:
        """Return the number of different slices."""
        return group.size if self.num_heads is None else min(group.size, self.num_heads)

    def local_size(self, name: str, size: int, groups: Groups) -> int:
        """Return this process's part of an axis of `size`. Raises ValueError, naming the layer, if it is not whole."""
        group = groups(self.group)
        count = self._num_slices(group)
        if self.num_rows is not None:
            return -(-size // count)
        units, what = (size, "features") if self.num_heads is None else (self.num_heads, "heads")
        if units % count or group.size % count:
            raise ValueError(
                f"{name}: {units} {what} cannot be divided among {group}. Choose sizes that divide them."
            )
        return size // count

    def whole_size(self, size: int, groups: Groups) -> int:
        """Return the size of the axis in a checkpoint for this process's `size`."""
        return (
            size * self._num_slices(groups(self.group)) if self.num_rows is None else self.num_rows
        )

    def take(self, tensor: torch.Tensor, groups: Groups) -> torch.Tensor:
        """Return this process's slice of a checkpoint's tensor, a view."""
        group = groups(self.group)
        count = self._num_slices(group)
        if count == 1:
            return tensor
        size = tensor.shape[self.axis]
        step = -(-size // count)
        start = min(size, group.rank * count // group.size * step)
        return tensor.narrow(self.axis, start, min(step, size - start))


@dataclass(frozen=True, slots=True)
class StackedShard:
    """The sharding of a tensor that stacks several weights along an axis: the rows of each weight, and its own shard."""

    parts: tuple[tuple[int, Shard], ...]
    axis: int = 0

    def local_size(self, name: str, size: int, groups: Groups) -> int:
        """Return this process's part of the axis. Raises ValueError as `Shard.local_size` does."""
        return sum(shard.local_size(name, rows, groups) for rows, shard in self.parts)

    def whole_size(self, size: int, groups: Groups) -> int:
        """Return the size of the axis in a checkpoint."""
        return sum(rows for rows, _ in self.parts)

    def take(self, tensor: torch.Tensor, groups: Groups) -> torch.Tensor:
        """Return this process's slices of a checkpoint's tensor, one after another."""
        if all(groups(shard.group).size == 1 for _, shard in self.parts):
            return tensor
        sizes = [rows for rows, _ in self.parts]
        parts = tensor.split_with_sizes(sizes, dim=self.axis)
        pairs = zip(self.parts, parts, strict=True)
        views = [replace(shard, axis=self.axis).take(part, groups) for (_, shard), part in pairs]
        with exact_pages(*views):
            return torch.cat(views, dim=self.axis)


Shards = Shard | StackedShard | tuple[Shard | StackedShard, ...] | None
"""The sharding of a tensor: on one axis, on several, or not at all."""


def each_shard(shards: Shards) -> tuple[Shard | StackedShard, ...]:
    """Return the shard of each sharded axis."""
    if shards is None:
        return ()
    return shards if isinstance(shards, tuple) else (shards,)


def take_shards(shards: Shards, tensor: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Return this process's part of a checkpoint's tensor."""
    for shard in each_shard(shards):
        tensor = shard.take(tensor, groups)
    return tensor


def whole_shape(shards: Shards, shape: torch.Size, groups: Groups) -> torch.Size:
    """Return the shape of a checkpoint's tensor for the shape of this process's part."""
    sizes = list(shape)
    for shard in each_shard(shards):
        sizes[shard.axis] = shard.whole_size(sizes[shard.axis], groups)
    return torch.Size(sizes)


@dataclass(frozen=True, slots=True, eq=False)
class OnlineQuantization:
    """Quantizes a weight while it is loaded: `store` takes it on the device, in `dtype`.

    A checkpoint may also hold the weight already quantized, in the dtype of the slot's target. Then it is copied, and
    the tensor called `scale_name` is copied to `scale`, of which `scale_shard` is the sharding.
    """

    dtype: torch.dtype
    store: Callable[[torch.Tensor], None]
    scale: torch.Tensor
    scale_name: str
    scale_shard: Shards = None


@dataclass(frozen=True, slots=True, eq=False)
class WeightSlot:
    """One tensor of a checkpoint and the view of a parameter that its part of this process fills.

    `shard` is None if every process holds the whole tensor. `kind` is "matrix", "bias", "norm", or "quantized" and
    "scale" for a weight that the checkpoint must hold quantized. A slot that `replaces` others holds the same weights
    in another form: a checkpoint has either that slot or the others. `on_load` receives the tensor, which is then
    not copied to the target. `on_complete` is called after all tensors were read. A checkpoint may lack an `is_optional`
    tensor, which the model does not use; `on_load` may check it. `make_dummy` generates a tensor of a shape for
    benchmarks without a checkpoint, the same on all processes.
    """

    name: str
    target: torch.Tensor
    shard: Shards
    kind: str = "matrix"
    replaces: tuple[str, ...] = ()
    quantization: OnlineQuantization | None = None
    on_load: Callable[[torch.Tensor], None] | None = None
    on_complete: Callable[[], None] | None = None
    is_optional: bool = False
    make_dummy: Callable[[torch.Size, torch.Generator], torch.Tensor] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of an unquantized tensor for this slot."""
        return self.target.dtype if self.quantization is None else self.quantization.dtype

    def shape(self, groups: Groups) -> torch.Size:
        """Return the shape of the checkpoint's tensor."""
        return whole_shape(self.shard, self.target.shape, groups)

    def fill(self, tensor: torch.Tensor, groups: Groups = ONE_PROCESS.group) -> None:
        """Store this process's part of a checkpoint's tensor, on any device and in any float dtype."""
        if self.kind == "scale":
            tensor = tensor.reshape(self.shape(groups))
        part = take_shards(self.shard, tensor, groups)
        with exact_pages(part) if groups("world").size > 1 else nullcontext():
            if self.on_load is not None:
                self.on_load(part)
            elif self.quantization is None or part.dtype == self.target.dtype:
                self.target.copy_(part)
            else:
                self.quantization.store(part.to(self.target.device, self.quantization.dtype))

    def check_unused(self, tensor: torch.Tensor) -> None:
        """Raise ValueError, with the slot's name, if an optional tensor holds values that the model must not ignore."""
        try:
            if self.on_load is not None:
                self.on_load(tensor)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error

    def mismatch(self, tensor: torch.Tensor, groups: Groups = ONE_PROCESS.group) -> str:
        """Return why a tensor does not fit the slot, or "". Scales may have more or fewer axes of size 1."""
        shape, expected = tensor.shape, self.shape(groups)
        is_same_scale = self.kind == "scale" and _sizes(shape) == _sizes(expected)
        if shape != expected and not is_same_scale:
            return _wrong_shape(self.name, tensor, expected)
        if tensor.dtype == self.target.dtype:
            return ""
        if self.dtype not in _FLOATS:
            return f"{self.name} is {tensor.dtype}, expected {self.target.dtype}"
        if tensor.dtype not in _FLOATS:
            expected_kind = "floats" if self.kind == "scale" else "an unquantized weight"
            return f"{self.name} is {tensor.dtype}, expected {expected_kind}"
        return ""


def _sizes(shape: torch.Size) -> list[int]:
    """Return the sizes of the axes that have more than one element."""
    return [size for size in shape if size != 1]


def _wrong_shape(name: str, tensor: torch.Tensor, expected: torch.Size) -> str:
    return f"{name} has shape {list(tensor.shape)}, expected {list(expected)}"


@dataclass(slots=True)
class _LoadErrors:
    """Problems of a checkpoint's weights, collected while they are read."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)

    def message(self) -> str:
        """Return all errors in one line, or ""."""
        kinds = (
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("given twice", self.repeated),
        )
        parts = [f"{kind}: {', '.join(_grouped(names))}" for kind, names in kinds if names]
        if self.mismatches:
            parts.append("; ".join(_grouped(self.mismatches)))
        return "; ".join(parts)


class _Scales:
    """Checks that each weight that comes quantized has a scale, and that no other weight has one."""

    def __init__(self, quantizations: Mapping[str, OnlineQuantization], groups: Groups) -> None:
        self._quantizations, self._groups = quantizations, groups
        self._needed: dict[str, None] = {}
        self._given: dict[str, None] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._quantizations

    def need(self, quantization: OnlineQuantization) -> None:
        """Record that a weight came quantized."""
        self._needed[quantization.scale_name] = None

    def fill(self, name: str, tensor: torch.Tensor, errors: _LoadErrors) -> None:
        """Copy a scale, or record why it does not fit. Per-channel scales may lack the last axis."""
        if name in self._given:
            errors.repeated.append(name)
            return
        self._given[name] = None
        quantization = self._quantizations[name]
        target, shard = quantization.scale, quantization.scale_shard
        expected = whole_shape(shard, target.shape, self._groups)
        is_flat = expected[1] == 1 and tensor.shape == expected[:1]
        if tensor.shape != expected and not is_flat:
            errors.mismatches.append(_wrong_shape(name, tensor, expected))
        elif target.dtype not in _FLOATS and tensor.dtype != target.dtype:
            errors.mismatches.append(f"{name} is {tensor.dtype}, expected {target.dtype}")
        elif target.dtype in _FLOATS and tensor.dtype not in _FLOATS:
            errors.mismatches.append(
                f"{name} is {tensor.dtype}, expected a float of 16 or more bits"
            )
        else:
            part = take_shards(shard, tensor.view(expected), self._groups)
            with exact_pages(part) if self._groups("world").size > 1 else nullcontext():
                target.copy_(part)

    def missing(self) -> list[str]:
        """Return the scales that quantized weights lack."""
        return [name for name in self._needed if name not in self._given]

    def unexpected(self) -> list[str]:
        """Return the scales of weights that came unquantized."""
        return [name for name in self._given if name not in self._needed]


def published_name(name: str, renames: Mapping[str, str]) -> str:
    """Return the name that published checkpoints have for a tensor or a module."""
    for part, published in renames.items():
        name = name.replace(part, published)
    return name


class WeightMap:
    """All slots of a model by checkpoint name.

    Tensors in `ignored` may occur in a checkpoint and are not read; a name that ends in a dot stands for all names
    below it, and so does that of an optional slot. `renames` maps parts of the slots' names to those that published
    checkpoints have instead. Both forms load. `groups` are the process groups that share the model. Raises ValueError
    if two slots have one name.
    """

    def __init__(
        self,
        slots: Iterable[WeightSlot],
        ignored: Iterable[str] = (),
        renames: Mapping[str, str] | None = None,
        groups: Groups = ONE_PROCESS.group,
    ) -> None:
        self._slots: dict[str, WeightSlot] = {}
        self._renames, self.groups = renames or {}, groups
        names = (*_IGNORED, *ignored)
        self._ignored = tuple(name for name in names if not name.endswith("."))
        self._ignored_below = {name for name in names if name.endswith(".")}
        for slot in map(self._renamed, slots) if renames else slots:
            if slot.name.endswith("."):
                self._ignored_below.add(slot.name)
                continue
            if slot.name in self._slots:
                raise ValueError(f"the weight map has two slots for {slot.name}")
            self._slots[slot.name] = slot
        self._quantizations = {
            slot.quantization.scale_name: slot.quantization
            for slot in self._slots.values()
            if slot.quantization is not None
        }

    def __iter__(self) -> Iterator[WeightSlot]:
        """Iterate over the slots of one complete checkpoint, without alternative forms of the same weights."""
        return (slot for slot in self._slots.values() if not slot.replaces and not slot.is_optional)

    def _is_ignored(self, name: str) -> bool:
        is_below = any(name[: dot.end()] in self._ignored_below for dot in re.finditer(r"\.", name))
        return is_below or any(f".{name}".endswith(f".{known}") for known in self._ignored)

    def _is_zero_bias(self, name: str, tensor: torch.Tensor) -> bool:
        """Return whether this is a bias of zeros, which AutoGPTQ wrote for each layer without a bias."""
        layer, _, part = name.rpartition(".")
        return part == "bias" and f"{layer}.qweight" in self._slots and not bool(tensor.any())

    def _renamed(self, slot: WeightSlot) -> WeightSlot:
        quantization = slot.quantization
        if quantization is not None:
            scale_name = published_name(quantization.scale_name, self._renames)
            quantization = replace(quantization, scale_name=scale_name)
        return replace(
            slot,
            name=published_name(slot.name, self._renames),
            replaces=tuple(published_name(each, self._renames) for each in slot.replaces),
            quantization=quantization,
        )

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors into their slots, converted to the parameter's dtype.

        Reads all tensors, then raises ValueError if any is missing, unexpected, given twice, or of the wrong shape or
        dtype. The message names all of them.
        """
        pending = {slot.name: None for slot in self}
        errors, seen = _LoadErrors(), set()
        scales = _Scales(self._quantizations, self.groups)
        for given, tensor in weights:
            name = published_name(given, self._renames)
            slot = self._slots.get(name)
            if slot is None:
                if name in scales:
                    scales.fill(name, tensor, errors)
                elif not self._is_ignored(name) and not self._is_zero_bias(name, tensor):
                    errors.unexpected.append(name)
                continue
            if slot.is_optional:
                slot.check_unused(tensor)
                continue
            filled = slot.replaces or (name,)
            if name in seen or any(part not in pending for part in filled):
                errors.repeated.append(name)
                continue
            seen.add(name)
            for part in filled:
                del pending[part]
            if slot.quantization is not None and tensor.dtype == slot.target.dtype:
                scales.need(slot.quantization)
            mismatch = slot.mismatch(tensor, self.groups)
            if mismatch:
                errors.mismatches.append(mismatch)
            else:
                slot.fill(tensor, self.groups)
        errors.missing.extend([*pending, *scales.missing()])
        errors.unexpected.extend(scales.unexpected())
        message = errors.message()
        if message:
            raise ValueError(
                f"the checkpoint's weights do not match its config.json: {message}. Correct config.json, or copy or "
                "download the checkpoint again."
            )
        for on_complete in dict.fromkeys(slot.on_complete for slot in self):
            if on_complete is not None:
                on_complete()


def _grouped(names: list[str]) -> list[str]:
    """Return the names; group many of them into patterns with counts, such as "layers.*.weight (28 of them)"."""
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
