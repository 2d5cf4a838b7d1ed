"""Linear layers: one GEMM, possibly quantized, for all projections that share an input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers.ops import dtype_name
from tokenspeed_models.layers.packed_weight import PackedWeight
from tokenspeed_models.layers.quantized_weight import QuantizedWeight
from tokenspeed_models.layers.scheme import full_name, shared_scheme
from tokenspeed_models.weights import Groups, Shard, StackedShard, WeightSlot

Activation = torch.Tensor | tuple[torch.Tensor, ...]
"""The input of a linear layer: x [T, in], or the quantized x with its scales."""


@dataclass(frozen=True, slots=True)
class Projection:
    """One linear layer of a checkpoint: its name there, its output size of all processes, and its sharding."""

    name: str
    size: int
    shard: Shard | StackedShard | None


def stacked(
    name: str | None, projections: tuple[Projection, Projection, *tuple[Projection, ...]]
) -> tuple[Projection, ...]:
    """Return the projections, or the one called `name` if the checkpoint stores them as one tensor, in their order."""
    if name is None:
        return projections
    parts = tuple((each.size, each.shard) for each in projections if isinstance(each.shard, Shard))
    return (Projection(name, sum(each.size for each in projections), StackedShard(parts)),)


class Linear:
    """Computes `x @ weight.T + bias` for the stacked weights of one or more projections.

    The arguments count the features of all processes. The attributes `in_size`, `out_size` and `sizes` count those of
    this process. If the input features are sharded, the output is a partial sum, to which the first process adds the
    bias. `scheme` is how the checkpoint or the user quantizes the weights; None: they are unquantized. Raises ValueError
    if the projections have different schemes, if a projection starts inside a block of rows that shares a scale, or if
    features cannot be divided.
    """

    def __init__(
        self,
        build: BuildContext,
        in_size: int,
        projections: tuple[Projection, ...],
        *,
        bias: bool = False,
    ) -> None:
        self._groups = build.group
        sizes = [_local_size(build, each.size, each, axis=0) for each in projections]
        in_size, out_size = _local_size(build, in_size, projections[0], axis=1), sum(sizes)
        problem = {"in_size": in_size, "out_size": out_size, "dtype": dtype_name(build.dtype)}
        self.in_size, self.out_size = in_size, out_size
        self.projections, self.sizes = projections, sizes
        self.scheme = scheme = shared_scheme(build, (each.name for each in projections))
        self.bias = torch.empty(out_size, dtype=build.dtype, device=build.device) if bias else None
        self.scale: torch.Tensor | None = None
        self.quantized_weight: QuantizedWeight | PackedWeight | None = None
        self._quantize: Callable[..., Any] | None = None
        self._quantize_linear: Callable[..., Any] | None = None
        self._input_operands: tuple[torch.Tensor, ...] = ()
        self._output_scale: tuple[torch.Tensor, ...] = ()
        if scheme is None:
            self.weight = torch.empty(out_size, in_size, dtype=build.dtype, device=build.device)
            self._operands: tuple[torch.Tensor | None, ...] = (self.weight,)
            self._linear = build.op("linear", **problem)
            return
        if scheme.linear is None:
            raise ValueError(
                f"quantization {scheme.name} supports only experts, but config.json selects it for "
                f"{projections[0].name}. Use another checkpoint of the model."
            )
        if scheme.packing is not None:
            axes = [axis for each in scheme.packing.stored for axis in each.axes]
            block_rows, block_features = (
                max([1, *(axis.per for axis in axes if axis.of == of)]) for of in ("out", "in")
            )
            _check_blocks_are_whole(build, scheme.name, block_rows, block_features, self)
            packed = PackedWeight(build, scheme, out_size, in_size)
            self.weight, self._operands = packed.weight, packed.operands
            self.quantized_weight, self._input_operands = packed, packed.input_operands
        else:
            block_rows, block_features = scheme.scale_block or (1, 1)
            _check_blocks_are_whole(build, scheme.name, block_rows, block_features, self)
            _check_block_alignment(scheme.name, block_rows, projections, sizes)
            self.quantized_weight = QuantizedWeight(
                build, scheme, out_size, in_size, num_projections=len(projections)
            )
            self.weight, self.scale = self.quantized_weight.values, self.quantized_weight.scale
            self._operands = (self.weight, self.scale)
            scales = self.quantized_weight.tensor_scales
            self._input_operands = () if scales is None else (scales.input_scale,)
            self._output_scale = () if scales is None else (scales.output_scales,)
        if scheme.quantize is not None:
            self._quantize = build.op(scheme.quantize, size=in_size, dtype=dtype_name(build.dtype))
        self._linear = build.op(scheme.linear, **problem, **scheme.problem)
        fused = scheme.fused.get("linear")
        if fused is not None:
            self._quantize_linear = build.op(fused, **problem)

    @property
    def operands(self) -> tuple[torch.Tensor | None, ...]:
        """The arguments that a fused op takes for this layer: weight, scale (if quantized), bias or None."""
        return *self._operands, self.bias

    def __call__(self, x: Activation) -> torch.Tensor:
        """Map x [T, in] to [T, out]; the outputs of the projections are concatenated."""
        result: torch.Tensor
        if self._quantize is None:
            result = self._linear(x, *self._operands, self.bias)
        elif self._quantize_linear is not None and isinstance(x, torch.Tensor):
            result = self._quantize_linear(x, *self._operands, self.bias)
        else:
            x, x_scale = x if isinstance(x, tuple) else self._quantize(x, *self._input_operands)
            result = self._multiply(x, x_scale, *self._operands, *self._output_scale)
        return result

    def _multiply(self, *operands: torch.Tensor | None) -> torch.Tensor:
        """Multiply quantized activations and weights, and add the bias."""
        result: torch.Tensor
        scales = None if self.quantized_weight is None else self.quantized_weight.tensor_scales
        if scales is None or scales.is_uniform:
            result = self._linear(*operands, self.bias)
            return result
        result = self._linear(*operands, None)
        outputs = result.split_with_sizes(self.sizes, dim=1)
        for output, ratio in zip(outputs, scales.ratios[0], strict=True):
            output.mul_(ratio)
        return result if self.bias is None else result.add_(self.bias)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """List the weight and bias of each projection. A bias is sharded like the weight's output axis."""
        start = 0
        for index, (projection, size) in enumerate(zip(self.projections, self.sizes, strict=True)):
            rows, shard = slice(start, start + size), projection.shard
            start += size
            if self.quantized_weight is None:
                yield WeightSlot(f"{prefix}{projection.name}.weight", self.weight[rows], shard)
            else:
                yield from self.quantized_weight.slots(
                    f"{prefix}{projection.name}", rows, shard, index
                )
            if self.bias is not None:
                yield bias_slot(
                    f"{prefix}{projection.name}.bias", self.bias[rows], shard, self._groups
                )


def bias_slot(
    name: str, bias: torch.Tensor, shard: Shard | StackedShard | None, groups: Groups
) -> WeightSlot:
    """Return the slot of a bias [O] of a weight [O, I] with the given sharding.

    If the input features are sharded, the outputs are added up, and all processes but the first have a bias of zero.
    """
    if shard is None or shard.axis == 0:
        return WeightSlot(name, bias, shard, "bias")
    is_first = not isinstance(shard, Shard) or groups(shard.group).rank == 0
    clear = None if is_first else partial(_clear, bias)
    return WeightSlot(name, bias, None, "bias", on_load=clear)


def _clear(bias: torch.Tensor, tensor: torch.Tensor) -> None:
    bias.zero_()


def _local_size(build: BuildContext, size: int, projection: Projection, axis: int) -> int:
    """Return this process's part of an axis of a projection's weight [out, in]."""
    shard = projection.shard
    if shard is None or shard.axis != axis:
        return size
    return shard.local_size(full_name(build, projection.name), size, build.group)


def _check_blocks_are_whole(
    build: BuildContext, method: str, block_rows: int, block_features: int, linear: Linear
) -> None:
    """Raise ValueError if a block of values that share a scale or are packed together is divided between processes."""
    for projection, size in zip(linear.projections, linear.sizes, strict=True):
        name = full_name(build, projection.name)
        parts: list[tuple[int, Shard]] = []
        match projection.shard:
            case StackedShard(stack):
                parts = [
                    (shard.local_size(name, rows, build.group), shard) for rows, shard in stack
                ]
            case Shard() as shard:
                parts = [(size if shard.axis == 0 else linear.in_size, shard)]
        for part, shard in parts:
            block = block_rows if shard.axis == 0 else block_features
            if part % block and build.group(shard.group).size > 1:
                raise ValueError(
                    f"quantization {method}: {name} has {part} features on each of "
                    f"{build.group(shard.group)}, and blocks of {block} cannot be divided. Use fewer processes."
                )


def _check_block_alignment(
    method: str, block_rows: int, projections: tuple[Projection, ...], local_sizes: list[int]
) -> None:
    """Raise ValueError if a projection starts at a row that is not a multiple of `block_rows`."""
    start = 0
    for projection, size in zip(projections, local_sizes, strict=True):
        if start % block_rows:
            pairs = zip(projections, local_sizes, strict=True)
            sizes = " + ".join(f"{each.name} {rows}" for each, rows in pairs)
            raise ValueError(
                f"--quantization {method}: {projection.name} starts at row {start} of the stacked weight ({sizes}), "
                f"which is not a multiple of {block_rows}, the rows that share a scale. Use an unquantized checkpoint, "
                "or a method with per-channel scales such as --quantization fp8."
            )
        start += size
