"""Weights as a quantization method stores them: values, block scales and per-tensor scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

from tokenspeed_core.api import BuildContext, QuantizationScheme
from tokenspeed_models.layers.ops import dtype_name
from tokenspeed_models.weights import OnlineQuantization, Shard, StackedShard, WeightSlot


class QuantizedWeight:
    """A weight [O, I], or the weights [E, O, I] of E experts, stored as a quantization method defines.

    An unquantized weight of a checkpoint is quantized on the device as it is loaded, one weight at a time. Methods
    with per-tensor scales need a checkpoint that is already quantized.
    """

    def __init__(
        self,
        build: BuildContext,
        method: QuantizationScheme,
        *shape: int,
        num_projections: int = 1,
        previous: QuantizedWeight | None = None,
    ) -> None:
        """Allocate the weight of `num_projections` stacked projections.

        `previous` is the gate and up weight if this is the down weight of the same experts.
        """
        *experts, rows, features = shape
        self._block_rows, block_features = method.scale_block or (1, features)
        self._has_row_scales = method.scale_block is None
        self._dtype, self._scale_name = build.dtype, method.scale_name
        self.values = torch.empty(
            *experts,
            rows,
            features // method.values_per_element,
            dtype=getattr(torch, method.dtype),
            device=build.device,
        )
        self.scale = torch.empty(
            *experts,
            -(-rows // self._block_rows),
            -(-features // block_features),
            dtype=getattr(torch, method.scale_dtype),
            device=build.device,
        )
        self.tensor_scales: TensorScales | None = None
        if method.has_tensor_scales:
            num_experts = experts[0] if experts else 1
            previous_scales = None if previous is None else previous.tensor_scales
            self.tensor_scales = TensorScales(build, num_experts, num_projections, previous_scales)
        else:
            op = method.quantize_weight or method.quantize
            assert op is not None, "only packed schemes lack an op that quantizes"
            self._quantize = build.op(op, size=features, dtype=dtype_name(build.dtype))

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        """The arguments that an experts op takes for this weight."""
        if self.tensor_scales is None:
            return self.values, self.scale
        scales = self.tensor_scales
        return scales.input_scale, self.values, self.scale, scales.weight_scales

    def slots(
        self,
        name: str,
        rows: slice,
        shard: Shard | StackedShard | None,
        projection: int = 0,
        expert: int | None = None,
    ) -> Iterator[WeightSlot]:
        """List the slots of one projection, which is stored in `rows`: its values and its scales."""
        values, scale = self.values, self.scale
        if expert is not None:
            values, scale = values[expert], scale[expert]
        values = values[rows]
        scale = scale[rows.start // self._block_rows : -(-rows.stop // self._block_rows)]
        scale_name, scale_shard = f"{name}.{self._scale_name}", self._scale_shard(shard, 0)
        if self.tensor_scales is None:
            store = partial(self._store, values, scale)
            online = OnlineQuantization(self._dtype, store, scale, scale_name, scale_shard)
            yield WeightSlot(f"{name}.weight", values, shard, quantization=online)
        else:
            yield WeightSlot(f"{name}.weight", values, shard, "quantized")
            yield WeightSlot(
                f"{name}.weight_packed", values, shard, "quantized", replaces=(f"{name}.weight",)
            )
            yield WeightSlot(scale_name, scale, scale_shard, "scale")
            yield from self.tensor_scales.slots(name, expert or 0, projection)

    def stacked_slots(
        self,
        name: str,
        num_experts: int,
        shards: tuple[Shard | StackedShard, ...],
        replaces: tuple[str, ...],
    ) -> Iterator[WeightSlot]:
        """List the slot of the one tensor that holds the weights of all experts in newer checkpoints.

        They fill the first `num_experts`. The names of their scales end like those of single weights: `{name}_scale_inv`
        if a single weight has `weight_scale_inv`.
        """
        if self.tensor_scales is None:
            values, scale = self.values[:num_experts], self.scale[:num_experts]
            scale_shards = tuple(
                scale_shard
                for shard in shards
                if (scale_shard := self._scale_shard(shard, 1)) is not None
            )
            online = OnlineQuantization(
                self._dtype,
                partial(self._store_experts, values, scale),
                scale,
                f"{name}{self._scale_name.removeprefix('weight')}",
                scale_shards,
            )
            yield WeightSlot(name, values, shards, replaces=replaces, quantization=online)

    def _scale_shard(
        self, shard: Shard | StackedShard | None, row_axis: int
    ) -> Shard | StackedShard | None:
        """Return the sharding of the scales, given that of the weight. `row_axis` is the axis of the weight's rows.

        The scale of a whole row belongs to all slices of its input features.
        """
        if shard is None or (shard.axis > row_axis and self._has_row_scales):
            return None
        if isinstance(shard, StackedShard):
            parts = tuple((rows // self._block_rows, part) for rows, part in shard.parts)
            return StackedShard(parts, shard.axis)
        return shard

    def _store_experts(
        self, values: torch.Tensor, scales: torch.Tensor, weights: torch.Tensor
    ) -> None:
        """Quantize the weights [E, O, I] of all experts into `values` and `scales`, one expert at a time."""
        for each in zip(values, scales, weights, strict=True):
            self._store(*each)

    def _store(self, values: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor) -> None:
        """Quantize a weight into `values` and `scale`."""
        quantized, quantized_scale = self._quantize(weight)
        values.copy_(quantized)
        scale.copy_(quantized_scale)


class TensorScales:
    """Per-tensor scales, float32: one for the input and one for each expert's weight.

    A checkpoint has both scales for each projection. The input takes the largest, which covers all calibrated values.
    Stacked projections share the weight scale of the first. `ratios` [E, projections] are the scales relative to that;
    the output of each projection is multiplied by its ratio unless `is_uniform`.

    For experts the output of gate and up is consumed inside one op, so the ratio of up moves to the down weight: up is
    linear, so scaling its output or the next weight gives the same result. The activations in between grow or shrink
    by the same ratio, which the input scale of the down weight covers.
    """

    def __init__(
        self,
        build: BuildContext,
        num_experts: int,
        num_projections: int,
        previous: TensorScales | None = None,
    ) -> None:
        self.input_scale = torch.zeros(1, dtype=torch.float32, device=build.device)
        self.weight_scales = torch.zeros(num_experts, dtype=torch.float32, device=build.device)
        # input_scale * weight_scales
        self.output_scales = torch.zeros(num_experts, dtype=torch.float32, device=build.device)
        shape = (num_experts, num_projections)
        self.ratios = torch.ones(shape, dtype=torch.float32, device=build.device)
        self.is_uniform = True
        self._previous = previous
        self._loaded = torch.ones(shape, dtype=torch.float32, device="cpu")
        self._max_input_scale = 0.0

    def slots(self, name: str, expert: int, projection: int) -> Iterator[WeightSlot]:
        """List the two scales of a projection, each under its two names; the second name stores the reciprocal."""
        set_weight = partial(self._set_weight_scale, expert, projection)
        for suffix, reciprocal_suffix, set_scale in (
            ("weight_scale_2", "weight_global_scale", set_weight),
            ("input_scale", "input_global_scale", self._add_input_scale),
        ):
            scale_name = f"{name}.{suffix}"
            reciprocal_name = f"{name}.{reciprocal_suffix}"
            yield WeightSlot(
                scale_name,
                self.input_scale,
                None,
                "scale",
                on_load=partial(_read_scale, set_scale, scale_name),
                on_complete=self._finish,
            )
            yield WeightSlot(
                reciprocal_name,
                self.input_scale,
                None,
                "scale",
                replaces=(scale_name,),
                on_load=partial(_read_reciprocal, set_scale, reciprocal_name),
            )

    def _add_input_scale(self, scale: float) -> None:
        self._max_input_scale = max(self._max_input_scale, scale)

    def _set_weight_scale(self, expert: int, projection: int, scale: float) -> None:
        self._loaded[expert, projection] = scale

    def _finish(self) -> None:
        """Write the scales to the device after all of them were read."""
        first = self._loaded[:, 0]
        if self._previous is None:
            up_ratio = torch.ones(1)
        else:
            up_ratio = self._previous._loaded[:, 1] / self._previous._loaded[:, 0]
        self.weight_scales.copy_(first * up_ratio)
        self.input_scale.fill_(self._max_input_scale / float(up_ratio.min().clamp(max=1.0)))
        torch.mul(self.input_scale, self.weight_scales, out=self.output_scales)
        self.ratios.copy_(self._loaded / first.unsqueeze(1))
        self.is_uniform = torch.allclose(
            self.ratios, torch.ones_like(self.ratios), rtol=1e-6, atol=0
        )


def _read_scale(set_scale: Callable[[float], None], name: str, tensor: torch.Tensor) -> None:
    """Pass a scale on. Raises ValueError if it is not positive and finite."""
    scale = float(tensor)
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(
            f"{name} is {scale}. Scales must be positive and finite. Quantize the model again."
        )
    set_scale(scale)


def _read_reciprocal(set_scale: Callable[[float], None], name: str, tensor: torch.Tensor) -> None:
    """Pass the reciprocal of a scale on. Raises ValueError if it is not positive and finite."""
    _read_scale(set_scale, name, tensor.to(torch.float32).reciprocal())
