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

    def __init__(
        self,
        build: BuildContext,
        method: Quantization,
        *shape: int,
        num_parts: int = 1,
        before: PackedWeight | None = None,
    ) -> None:
        """Allocate it for so many projections one under the other; for experts' last weight, name the one before."""
        *experts, rows, features = shape
        self._rows, each = method.scale_block or (1, features)
        self._dtype, self._scale_name = build.dtype, method.scale_name
        self.codes = torch.empty(
            *experts,
            rows,
            features // method.values_per_element,
            dtype=getattr(torch, method.dtype),
            device=build.device,
        )
        self.scale = torch.empty(
            *experts,
            -(-rows // self._rows),
            -(-features // each),
            dtype=getattr(torch, method.scale_dtype),
            device=build.device,
        )
        behind = None if before is None else before.over_all
        num_weights = experts[0] if experts else 1
        self.over_all: TensorScales | None = (
            TensorScales(build, num_weights, num_parts, behind)
            if method.has_tensor_scales
            else None
        )
        if self.over_all is None:
            pack = method.quantize_weight or method.quantize
            self._pack = build.op(pack, size=features, dtype=dtype_name(build.dtype))

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        """What an op of experts takes of this weight."""
        if self.over_all is None:
            return self.codes, self.scale
        return self.over_all.activations, self.codes, self.scale, self.over_all.weights

    def slots(
        self, name: str, rows: slice, shard: Shard | None, part: int = 0, expert: int | None = None
    ) -> Iterator[WeightSlot]:
        """List what fills some rows, those of the projection of that name and place, and their scales."""
        codes, scale = (
            (self.codes, self.scale) if expert is None else (self.codes[expert], self.scale[expert])
        )
        codes, scale = codes[rows], scale[rows.start // self._rows : -(-rows.stop // self._rows)]
        scale_name = f"{name}.{self._scale_name}"
        if self.over_all is None:
            packing = Packing(self._dtype, partial(self._store, codes, scale), scale, scale_name)
            yield WeightSlot(f"{name}.weight", codes, shard, packing=packing)
        else:
            yield WeightSlot(f"{name}.weight", codes, shard, "codes")
            yield WeightSlot(
                f"{name}.weight_packed", codes, shard, "codes", replaces=(f"{name}.weight",)
            )
            yield WeightSlot(scale_name, scale, shard, "scale")
            yield from self.over_all.slots(name, expert or 0, part)

    def stacked_slots(
        self, name: str, shard: Shard, replaces: tuple[str, ...]
    ) -> Iterator[WeightSlot]:
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
    """The factors that stand over all values of an operand: one of activations, one of each expert's weight, float32.

    Checkpoints have both for each projection. Activations take the largest, which covers all that were measured. Of
    projections one under the other a weight takes the first one's, `weights`; what the others' are of that is in
    `shares` [E, parts], by which products are multiplied where they are not `even`. Of experts' gate and up, whose
    product comes between, that share is handed on to the weight behind it: as up is linear, it may as well stand there,
    and the activations between are as many times smaller or larger.
    """

    def __init__(
        self,
        build: BuildContext,
        num_weights: int,
        num_parts: int,
        before: TensorScales | None = None,
    ) -> None:
        self.activations = torch.zeros(1, dtype=torch.float32, device=build.device)
        self.weights = torch.zeros(num_weights, dtype=torch.float32, device=build.device)
        self.products = torch.zeros(num_weights, dtype=torch.float32, device=build.device)
        self.shares = torch.ones(num_weights, num_parts, dtype=torch.float32, device=build.device)
        self.even = True
        self._before = before
        self._read = torch.ones(num_weights, num_parts, dtype=torch.float32, device="cpu")
        self._widest = 0.0

    def slots(self, name: str, expert: int, part: int) -> Iterator[WeightSlot]:
        """List a projection's two factors, each under the two names that writers use: the second are reciprocals."""
        for what, inverse, take in (
            ("weight_scale_2", "weight_global_scale", partial(self._take_weight, expert, part)),
            ("input_scale", "input_global_scale", self._take_activations),
        ):
            given, reciprocal = f"{name}.{what}", f"{name}.{inverse}"
            yield WeightSlot(
                given,
                self.activations,
                None,
                "scale",
                take=partial(_positive, take, given),
                settle=self._settle,
            )
            yield WeightSlot(
                reciprocal,
                self.activations,
                None,
                "scale",
                replaces=(given,),
                take=partial(_positive_inverse, take, reciprocal),
            )

    def _take_activations(self, factor: float) -> None:
        self._widest = max(self._widest, factor)

    def _take_weight(self, expert: int, part: int, factor: float) -> None:
        self._read[expert, part] = factor

    def _settle(self) -> None:
        """Write what was read to the device, once all is."""
        first = self._read[:, 0]
        handed_on = (
            torch.ones(1)
            if self._before is None
            else self._before._read[:, 1] / self._before._read[:, 0]
        )
        self.weights.copy_(first * handed_on)
        self.activations.fill_(self._widest / float(handed_on.min().clamp(max=1.0)))
        torch.mul(self.activations, self.weights, out=self.products)
        self.shares.copy_(self._read / first.unsqueeze(1))
        self.even = torch.allclose(self.shares, torch.ones_like(self.shares), rtol=1e-6, atol=0)


def _positive(take: Callable[[float], None], name: str, tensor: torch.Tensor) -> None:
    """Take a factor. Raises ValueError on one that is not above zero and finite."""
    factor = float(tensor)
    if not (factor > 0 and math.isfinite(factor)):
        raise ValueError(
            f"{name} is {factor}, and must be above zero and finite; quantise the model again"
        )
    take(factor)


def _positive_inverse(take: Callable[[float], None], name: str, tensor: torch.Tensor) -> None:
    """Take the reciprocal of a factor. Raises as `_positive`."""
    _positive(take, name, tensor.to(torch.float32).reciprocal())
