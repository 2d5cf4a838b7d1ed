"""Linear maps: one matrix product for all projections that share an input, quantised if the user wants it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers.packed import PackedWeight, dtype_name
from tokenspeed_models.weights import Shard, WeightSlot

Activation = torch.Tensor | tuple[torch.Tensor, ...]
"""What a linear map takes: x [T, in], or what the method's `quantize` makes of it: x and its scales."""


def fused_op(build: BuildContext, op: str) -> str:
    """Return the op that the method of quantisation has in place of an op, or the op itself where there is none."""
    return op if build.quantization is None else build.quantization.fused.get(op, op)


@dataclass(frozen=True, slots=True)
class Projection:
    """One linear map of a checkpoint: its name there, its output features, how its weight is cut."""

    name: str
    size: int
    shard: Shard | None


class Linear:
    """Computes `x @ weight.T + bias` for the stacked weights of one or more projections.

    Under `build.quantization` the weight and its `scale` are held as its method says, unless the map is to be kept
    whole. Raises ValueError where a projection would begin among rows that share a scale with those before.
    """

    def __init__(
        self,
        build: BuildContext,
        in_size: int,
        projections: tuple[Projection, ...],
        *,
        bias: bool = False,
        is_whole: bool = False,
    ) -> None:
        out_size = sum(projection.size for projection in projections)
        method = None if is_whole else build.quantization
        problem = {"in_size": in_size, "out_size": out_size, "dtype": dtype_name(build.dtype)}
        self.in_size, self.out_size, self.projections = in_size, out_size, projections
        self.bias = torch.empty(out_size, dtype=build.dtype, device=build.device) if bias else None
        if method is None:
            self.weight = torch.empty(out_size, in_size, dtype=build.dtype, device=build.device)
            self.scale, self.packed = None, None
            self._linear = build.op("linear", **problem)
        else:
            _require_whole_blocks(
                method.name, method.scale_block[0] if method.scale_block else 1, projections
            )
            self.packed = packed = PackedWeight(
                build, method, out_size, in_size, num_parts=len(projections)
            )
            self.weight, self.scale = packed.codes, packed.scale
            over_all = packed.over_all
            self._over_x = () if over_all is None else (over_all.activations,)
            self._over_both = () if over_all is None else (over_all.products,)
            self._quantize = build.op(method.quantize, size=in_size, dtype=dtype_name(build.dtype))
            self._linear = build.op(method.linear, **problem)
            fused = method.fused.get("linear")
            self._whole = None if fused is None else build.op(fused, **problem)

    @property
    def operands(self) -> tuple[torch.Tensor | None, ...]:
        """What an op takes of this map: the weight, its scales if it is quantised, the bias or None."""
        return (
            (self.weight, self.bias) if self.scale is None else (self.weight, self.scale, self.bias)
        )

    def __call__(self, x: Activation) -> torch.Tensor:
        """Map x [T, in] to [T, out], the projections side by side."""
        result: torch.Tensor
        if self.scale is None:
            result = self._linear(x, self.weight, self.bias)
        elif self._whole is not None and isinstance(x, torch.Tensor):
            result = self._whole(x, self.weight, self.scale, self.bias)
        else:
            x, x_scale = x if isinstance(x, tuple) else self._quantize(x, *self._over_x)
            result = self._multiply(x, x_scale, self.weight, self.scale, *self._over_both)
        return result

    def _multiply(self, *operands: torch.Tensor) -> torch.Tensor:
        """Return the product of quantised operands, and the bias."""
        result: torch.Tensor
        over_all = None if self.packed is None else self.packed.over_all
        if over_all is None or over_all.even:
            result = self._linear(*operands, self.bias)
            return result
        result = self._linear(*operands, None)
        sizes = [projection.size for projection in self.projections]
        for part, share in zip(
            result.split_with_sizes(sizes, dim=1), over_all.shares[0], strict=True
        ):
            part.mul_(share)
        return result if self.bias is None else result.add_(self.bias)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """List the weights, and biases, of each projection. A bias is cut with the weight's output axis."""
        start = 0
        for part, projection in enumerate(self.projections):
            rows, shard = slice(start, start + projection.size), projection.shard
            start += projection.size
            if self.packed is None:
                yield WeightSlot(f"{prefix}{projection.name}.weight", self.weight[rows], shard)
            else:
                yield from self.packed.slots(f"{prefix}{projection.name}", rows, shard, part)
            if self.bias is not None:
                cut = shard if shard is not None and shard.axis == 0 else None
                yield WeightSlot(f"{prefix}{projection.name}.bias", self.bias[rows], cut, "bias")


def _require_whole_blocks(method: str, num_rows: int, projections: tuple[Projection, ...]) -> None:
    """Raise ValueError where a projection begins at a row that is no multiple of the `num_rows` that share a scale."""
    start = 0
    for projection in projections:
        if start % num_rows:
            sizes = " + ".join(f"{each.name} {each.size}" for each in projections)
            raise ValueError(
                f"--quantization {method}: {projection.name} begins at row {start} of the weights that are multiplied "
                f"together ({sizes}), and {num_rows} rows share a scale, so each must begin at a multiple of "
                f"{num_rows}; use an unquantised checkpoint, without --quantization or with a method whose scales are "
                "a row's, such as fp8"
            )
        start += projection.size
