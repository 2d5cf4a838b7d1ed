"""The gated MLP of a decoder layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers.linear import Activation, Linear, Projection, fused_op
from tokenspeed_models.layers.norm import NormedLinear, RMSNorm
from tokenspeed_models.layers.packed import dtype_name
from tokenspeed_models.placement import Boundary, Partial, Replicated, Sharded
from tokenspeed_models.weights import Shard, WeightSlot


class MLP:
    """Computes `down(silu(gate(x)) * up(x))`, with gate and up as one matrix product."""

    def __init__(
        self, build: BuildContext, hidden_size: int, intermediate_size: int, *, bias: bool = False
    ) -> None:
        columns, rows = Shard(0, "dense"), Shard(1, "dense")
        self.gate_up = Linear(
            build,
            hidden_size,
            (
                Projection("gate_proj", intermediate_size, columns),
                Projection("up_proj", intermediate_size, columns),
            ),
            bias=bias,
        )
        self.down = Linear(
            build, intermediate_size, (Projection("down_proj", hidden_size, rows),), bias=bias
        )
        is_whole, dtype = build.quantization is None, dtype_name(build.dtype)
        fused = fused_op(build, "add_rms_norm_mlp")
        self._whole = (
            None
            if fused == "add_rms_norm_mlp"
            else build.op(fused, hidden_size=hidden_size, size=intermediate_size, dtype=dtype)
        )
        self._normed_gate_up = NormedLinear(build, self.gate_up, is_gated=is_whole)
        self._silu_mul = (
            None
            if is_whole
            else build.op(fused_op(build, "silu_mul"), size=intermediate_size, dtype=dtype)
        )

    def __call__(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the map [T, hidden] of x + residual [T, hidden], normalised; and that sum.

        The residual may be overwritten by the sum.
        """
        if self._whole is not None:
            result: tuple[torch.Tensor, torch.Tensor] = self._whole(
                x, residual, norm.weight, norm.eps, *self.gate_up.operands, *self.down.operands
            )
            return result
        hidden: Activation
        hidden, residual = self._normed_gate_up(norm, x, residual)
        if self._silu_mul is not None:
            hidden = self._silu_mul(hidden)
        return self.down(hidden), residual

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """List the weights of the three projections."""
        yield from self.gate_up.slots(prefix)
        yield from self.down.slots(prefix)

    def boundaries(self, prefix: str) -> Iterator[Boundary]:
        """Features inside are cut over the dense group; the result is a sum."""
        yield Boundary(f"{prefix}gate_up", "dense", Replicated(), Sharded("features"))
        yield Boundary(f"{prefix}down", "dense", Sharded("features"), Partial())
