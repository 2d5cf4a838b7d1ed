"""Linear maps: one matrix product for all projections that share an input."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tokenspeed_core.api import BuildContext
from tokenspeed_models.weights import Shard, WeightSlot


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype as op problems spell it, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Projection:
    """One linear map of a checkpoint: its name there, its output features, how its weight is cut."""

    name: str
    size: int
    shard: Shard | None


class Linear:
    """Computes `x @ weight.T + bias` for the stacked weights of one or more projections."""

    def __init__(
        self, build: BuildContext, in_size: int, projections: tuple[Projection, ...], *, bias: bool = False
    ) -> None:
        out_size = sum(projection.size for projection in projections)
        self.projections = projections
        self.weight = torch.empty(out_size, in_size, dtype=build.dtype, device=build.device)
        self.bias = torch.empty(out_size, dtype=build.dtype, device=build.device) if bias else None
        self._linear = build.op("linear", in_size=in_size, out_size=out_size, dtype=dtype_name(build.dtype))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [T, in] to [T, out], the projections side by side."""
        result: torch.Tensor = self._linear(x, self.weight, self.bias)
        return result

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """List the weights, and biases, of each projection. A bias is cut with the weight's output axis."""
        start = 0
        for projection in self.projections:
            rows, shard = slice(start, start + projection.size), projection.shard
            start += projection.size
            yield WeightSlot(f"{prefix}{projection.name}.weight", self.weight[rows], shard)
            if self.bias is not None:
                cut = shard if shard is not None and shard.axis == 0 else None
                yield WeightSlot(f"{prefix}{projection.name}.bias", self.bias[rows], cut, "bias")
