"""Weights of quantized checkpoints that are repacked while they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name

import torch

from tokenspeed_core.api import BuildContext, QuantizationScheme, StoredTensor
from tokenspeed_models.layers.quantized_weight import TensorScales
from tokenspeed_models.weights import Shard, StackedShard, WeightSlot

Tensors = Mapping[str, torch.Tensor]
# The deviation of random values, and a bound that all of them are below.
_FP8_DEVIATION, _FP8_MAX = 100.0, 448.0


class PackedWeight:
    """A weight [O, I], or the weights [E, O, I] of E experts, as the `Packing` of a scheme describes it.

    The tensors of a projection are repacked on the device as soon as all of them were read, and dropped.
    """

    tensor_scales: TensorScales | None = None

    def __init__(self, build: BuildContext, scheme: QuantizationScheme, *shape: int) -> None:
        """Allocate the operands. Raises ValueError if the input features do not fit the scheme's groups."""
        assert scheme.packing is not None, "only schemes with a packing store packed weights"
        *self._experts, out_size, self._in_size = shape
        self._packing, self._build, self._problem = scheme.packing, build, scheme.problem
        self._repack: Callable[[Tensors], Tensors] = (
            dict if scheme.packing.repack is None else resolve_name(scheme.packing.repack)
        )
        for tensor in scheme.packing.stored:
            for axis in tensor.axes:
                size = self._in_size if axis.of == "in" else out_size
                if axis.per and size % axis.per:
                    features = "input" if axis.of == "in" else "output"
                    raise ValueError(
                        f"quantization {scheme.name}: a linear layer has {size} {features} features, and {tensor.name} "
                        f"needs a multiple of {axis.per}. Use another checkpoint of the model."
                    )
        operands = [each for each in scheme.packing.operands if each is not None]
        made = [(each, (*self._experts, *self._shape(each, out_size))) for each in operands]
        made += [(each, self._shape(each, out_size)) for each in scheme.packing.input_operands]
        self._tensors = {
            each.name: torch.zeros(shape, dtype=self._dtype(each), device=build.device)
            for each, shape in made
        }
        self._shared: set[tuple[str, int]] = set()

    @property
    def operands(self) -> tuple[torch.Tensor | None, ...]:
        """The arguments that the linear op takes for this weight."""
        return tuple(
            None if each is None else self._tensors[each.name] for each in self._packing.operands
        )

    @property
    def input_operands(self) -> tuple[torch.Tensor, ...]:
        """The arguments that the op takes that quantizes activations. Experts share them."""
        return tuple(self._tensors[each.name] for each in self._packing.input_operands)

    @property
    def weight(self) -> torch.Tensor:
        """The first operand: the quantized values."""
        (weight, *_) = self.operands
        assert weight is not None, "the first operand is the weight"
        return weight

    def slots(
        self,
        name: str,
        rows: slice,
        shard: Shard | StackedShard | None,
        projection: int = 0,
        expert: int | None = None,
    ) -> Iterator[WeightSlot]:
        """List the tensors of one projection, which is stored in `rows`."""
        if projection == 0:
            self._shared = {each for each in self._shared if each[1] != (expert or 0)}
        add = self._collector(lambda tensors: self._store(name, rows, expert or 0, tensors))

        def add_local(stored: StoredTensor, tensor: torch.Tensor) -> None:
            if stored.kind == "index":
                tensor = self._local_groups(f"{name}.{stored.name}", tensor, shard)
            add(stored, tensor)

        for each in self._packing.stored:
            target = self._target(each, self._shape(each, rows.stop - rows.start))
            yield WeightSlot(
                f"{name}.{each.name}",
                target,
                _shard(each, shard),
                each.kind,
                on_load=partial(add_local, each) if each.is_needed else _unused_check(each),
                is_optional=not each.is_needed,
                make_dummy=partial(self._make_dummy, each, target.dtype),
            )

    def stacked_slots(
        self,
        name: str,
        num_experts: int,
        shards: tuple[Shard | StackedShard, ...],
        replaces: tuple[str, ...],
    ) -> Iterator[WeightSlot]:
        """List the tensors of all experts if a checkpoint stacks those of single experts.

        They have the names of a layer's tensors, below `name`, and fill the first `num_experts`. `replaces` are the
        names of the weights of single experts. Return no slots if the rows of a weight share a tensor, such as
        the order of their columns.
        """
        if not all(_has_rows(each) for each in self._packing.stored if each.is_needed):
            return
        experts, shard = shards

        def store(tensors: Tensors) -> None:
            for expert in range(num_experts):
                own = {key: each[expert] for key, each in tensors.items()}
                self._store(name, slice(None), expert, own)

        add = self._collector(store)
        for each in self._packing.stored:
            within = _shard(each, replace(shard, axis=shard.axis - 1))
            yield WeightSlot(
                f"{name}.{each.name}",
                self._target(each, (num_experts, *self._shape(each, self.weight.shape[-2]))),
                (experts,) if within is None else (experts, replace(within, axis=within.axis + 1)),
                each.kind,
                replaces=tuple(
                    f"{weight.removesuffix('weight')}{each.name}" for weight in replaces
                ),
                on_load=partial(add, each) if each.is_needed else _unused_check(each),
                is_optional=not each.is_needed,
            )

    def _collector(
        self, store: Callable[[Tensors], None]
    ) -> Callable[[StoredTensor, torch.Tensor], None]:
        """Return a function that takes the stored tensors one by one, and calls `store` when it has all of them."""
        needed = {each.name for each in self._packing.stored if each.is_needed}
        pending: dict[str, torch.Tensor] = {}

        def add(stored: StoredTensor, tensor: torch.Tensor) -> None:
            pending[stored.name] = tensor
            if pending.keys() == needed:
                store(pending)
                pending.clear()

        return add

    def _target(self, stored: StoredTensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor with the shape, dtype and device of a stored one, but no memory for its values."""
        made = torch.empty(1, dtype=self._dtype(stored), device=self._build.device)
        return made.expand(shape)

    def _store(self, name: str, rows: slice, expert: int, tensors: Tensors) -> None:
        """Repack the tensors of one projection. Raises ValueError, which names the layer."""
        device = self._build.device
        try:
            repacked = self._repack({key: each.to(device) for key, each in tensors.items()})
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        for each in (*self._packing.operands, *self._packing.input_operands):
            if each is None:
                continue
            target, value = self._tensors[each.name], repacked[each.name]
            is_input = each in self._packing.input_operands
            owner = 0 if is_input else expert
            if self._experts and not is_input:
                target = target[expert]
            if _has_rows(each):
                target[rows].copy_(value)
            elif (each.name, owner) not in self._shared:
                self._shared.add((each.name, owner))
                target.copy_(value)
            elif target.is_floating_point():
                torch.maximum(target, value.to(target.dtype), out=target)
            elif not torch.equal(target, value.to(target.dtype)):
                raise ValueError(
                    f"{name}: {each.name} differs from that of a projection with the same input. Their weights are "
                    "stacked, so both must have equal values. Quantize the model again."
                )

    def _shape(self, tensor: StoredTensor, out_size: int) -> tuple[int, ...]:
        sizes = {"in": self._in_size, "out": out_size}
        return tuple(-(-sizes[axis.of] // axis.per) if axis.per else 1 for axis in tensor.axes)

    def _dtype(self, tensor: StoredTensor) -> torch.dtype:
        if tensor.dtype == "float":
            return self._build.dtype
        dtype: torch.dtype = getattr(torch, tensor.dtype)
        return dtype

    def _local_groups(
        self, name: str, groups: torch.Tensor, shard: Shard | StackedShard | None
    ) -> torch.Tensor:
        """Return the group of each input feature of this process, counted from its first group.

        Raises ValueError if its features have groups of other processes.
        """
        if not isinstance(shard, Shard) or shard.axis == 0:
            return groups
        members = self._build.group(shard.group)
        if members.size == 1:
            return groups
        num_groups = self._in_size // self._problem["group_size"]
        local = groups - members.rank * num_groups
        if local.numel() and (int(local.min()) < 0 or int(local.max()) >= num_groups):
            raise ValueError(
                f"{name} orders the input features (desc_act) across {members}. Set "
                f"--{members.name}-tp-size 1, or use a checkpoint without desc_act."
            )
        return local

    def _make_dummy(
        self,
        stored: StoredTensor,
        dtype: torch.dtype,
        shape: torch.Size,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """Return random values, a scale of typical size, or groups in their order."""
        device = self._build.device
        if stored.kind == "scale":
            return torch.full(shape, stored.typical, dtype=dtype, device=device)
        if stored.kind == "index":
            features = torch.arange(shape[0], device=device)
            return (features // self._problem["group_size"]).to(dtype)
        if dtype.is_floating_point:
            values = torch.empty(shape, dtype=torch.float32, device=device)
            values.normal_(0.0, _FP8_DEVIATION, generator=generator)
            return values.clamp_(-_FP8_MAX, _FP8_MAX).to(dtype)
        bounds = torch.iinfo(dtype)
        return torch.randint(
            bounds.min, bounds.max, shape, dtype=dtype, device=device, generator=generator
        )


def _has_rows(tensor: StoredTensor) -> bool:
    """Return whether the rows of the weight [out, in] have their own values in a tensor."""
    return any(axis.of == "out" and axis.per for axis in tensor.axes)


def _shard(stored: StoredTensor, shard: Shard | StackedShard | None) -> Shard | StackedShard | None:
    """Return the sharding of a stored tensor, given the sharding of the weight [out, in]."""
    if shard is None:
        return None
    of = "out" if shard.axis == 0 else "in"
    for index, axis in enumerate(stored.axes):
        if axis.of != of or not axis.per:
            continue
        if isinstance(shard, Shard):
            return Shard(index, shard.group, shard.num_heads)
        parts = tuple((rows // axis.per, part) for rows, part in shard.parts)
        return StackedShard(parts, index)
    return None


def _unused_check(stored: StoredTensor) -> Callable[[torch.Tensor], None] | None:
    """Return the function that checks a tensor that the model does not use, None if there is nothing to check."""
    return _check_order if stored.kind == "index" else None


def _check_order(groups: torch.Tensor) -> None:
    """Raise ValueError unless the input features are in the order of their groups [in]."""
    if bool((groups.diff() < 0).any()):
        raise ValueError(
            "the input features are not in the order of their groups, but quantization_config has no activation "
            "order (desc_act or actorder). Correct config.json."
        )
