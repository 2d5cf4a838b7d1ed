"""Weights as a method of quantisation holds them: codes, the scales of their blocks, and what stands over them all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

from tokenspeed_core.api import BuildContext, Quantization
from tokenspeed_models.weights import Packing, Shard, WeightSlot


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype as op problems spell it, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


class PackedWeight:
    """A weight [O, I], or that of each of E experts [E, O, I], in the form of a method.

    A weight that a checkpoint holds whole is quantised on the device when it is loaded, so no more than one of them is
    there in full. Where scales stand over all values of an operand, checkpoints must hold it quantised.
    """

    def __init__(self, build: BuildContext, method: Quantization, *shape: int) -> None:
        *experts, rows, features = shape
        self._rows, each = method.scale_block or (1, features)
        self._dtype, self._scale_name = build.dtype, method.scale_name
        self.codes = torch.empty(
            *experts, rows, features // method.values_per_element, dtype=getattr(torch, method.dtype),
            device=build.device)
        self.scale = torch.empty(
            *experts, -(-rows // self._rows), -(-features // each), dtype=getattr(torch, method.scale_dtype),
            device=build.device)
        self.over_all = TensorScales(build, *experts) if method.has_tensor_scales else None
        if self.over_all is None:
            pack = method.quantize_weight or method.quantize
            self._pack = build.op(pack, size=features, dtype=dtype_name(build.dtype))

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        """What an op of experts takes of this weight."""
        if self.over_all is None:
            return self.codes, self.scale
        return self.over_all.activations, self.codes, self.scale, self.over_all.weights

    def slots(self, name: str, rows: slice, shard: Shard | None, expert: int | None = None) -> Iterator[WeightSlot]:
        """List what fills some rows, those of the projection of that name, and their scales."""
        codes, scale = (self.codes, self.scale) if expert is None else (self.codes[expert], self.scale[expert])
        codes, scale = codes[rows], scale[rows.start // self._rows : -(-rows.stop // self._rows)]
        scale_name = f"{name}.{self._scale_name}"
        if self.over_all is None:
            packing = Packing(self._dtype, partial(self._store, codes, scale), scale, scale_name)
            yield WeightSlot(f"{name}.weight", codes, shard, packing=packing)
        else:
            yield WeightSlot(f"{name}.weight", codes, shard, "codes")
            yield WeightSlot(f"{name}.weight_packed", codes, shard, "codes", replaces=(f"{name}.weight",))
            yield WeightSlot(scale_name, scale, shard, "scale")
            yield from self.over_all.slots(name, expert or 0)

    def stacked_slots(self, name: str, shard: Shard, replaces: tuple[str, ...]) -> Iterator[WeightSlot]:
        """List the one tensor in which newer writers stack what all experts hold whole, if it is quantised on load."""
        if self.over_all is None:
            packing = Packing(self._dtype, self._store_experts, self.scale, f"{name}_scale")
            yield WeightSlot(name, self.codes, shard, replaces=replaces, packing=packing)

    def _store_experts(self, weight: torch.Tensor) -> None:
        """Quantise the weights [E, O, I] of all experts into their places, one after another."""
        for codes, scale, each in zip(self.codes, self.scale, weight, strict=True):
            self._store(codes, scale, each)

    def _store(self, held: torch.Tensor, held_scale: torch.Tensor, weight: torch.Tensor) -> None:
        """Quantise a weight into its place."""
        values, scale = self._pack(weight)
        held.copy_(values)
        held_scale.copy_(scale)


class TensorScales:
    """The factors that stand over all values of an operand: one of activations, one of each weight, float32.

    Checkpoints have them for each projection, and those that are multiplied together share one. Activations take the
    largest, which covers all that were measured. Weights hold codes by theirs, so they must agree.
    """

    def __init__(self, build: BuildContext, num_weights: int = 1) -> None:
        self.activations = torch.zeros(1, dtype=torch.float32, device=build.device)
        self.weights = torch.ones(num_weights, dtype=torch.float32, device=build.device)
        self.products = torch.zeros(num_weights, dtype=torch.float32, device=build.device)
        self._given: dict[int, tuple[str, float]] = {}

    def slots(self, name: str, index: int) -> Iterator[WeightSlot]:
        """List a projection's two factors, each under the two names that writers use: the second are reciprocals."""
        weight = self.weights[index : index + 1]
        for what, inverse, target, take in (
            ("weight_scale_2", "weight_global_scale", weight, partial(self._take_weight, index)),
            ("input_scale", "input_global_scale", self.activations, self._take_activations),
        ):
            yield WeightSlot(f"{name}.{what}", target, None, "scale", take=partial(_positive, take, f"{name}.{what}"))
            yield WeightSlot(f"{name}.{inverse}", target, None, "scale", replaces=(f"{name}.{what}",),
                             take=partial(_positive_inverse, take, f"{name}.{inverse}"))

    def _take_activations(self, name: str, factor: float) -> None:
        """Take a factor of activations; that of the widest projection stays."""
        del name
        self.activations.clamp_(min=factor)
        torch.mul(self.activations, self.weights, out=self.products)

    def _take_weight(self, index: int, name: str, factor: float) -> None:
        """Take a factor of a weight. Raises ValueError where that of a projection beside it is another."""
        first, known = self._given.setdefault(index, (name, factor))
        if not math.isclose(known, factor, rel_tol=1e-6):
            raise ValueError(
                f"{first} and {name} belong to weights that are multiplied together and say {known:g} and {factor:g}: "
                "they must share one factor; quantise the model with a version of the writer that gives them one "
                "(NVIDIA ModelOpt and llm-compressor do)"
            )
        self.weights[index] = known
        torch.mul(self.activations, self.weights, out=self.products)


def _positive(take: Callable[[str, float], None], name: str, tensor: torch.Tensor) -> None:
    """Take a factor. Raises ValueError on one that is not above zero and finite."""
    factor = float(tensor)
    if not (factor > 0 and math.isfinite(factor)):
        raise ValueError(f"{name} is {factor}, and must be above zero and finite; quantise the model again")
    take(name, factor)


def _positive_inverse(take: Callable[[str, float], None], name: str, tensor: torch.Tensor) -> None:
    """Take the reciprocal of a factor. Raises as `_positive`."""
    _positive(take, name, tensor.to(torch.float32).reciprocal())
