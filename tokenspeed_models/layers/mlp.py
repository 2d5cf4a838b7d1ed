"""The gated MLP of a decoder layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers.linear import Activation, Linear, Projection
from tokenspeed_models.layers.norm import NormedLinear, RMSNorm
from tokenspeed_models.layers.ops import dtype_name, quantized_op
from tokenspeed_models.sharding import Partial, Replicated, Sharded, ShardingSpec
from tokenspeed_models.weights import Shard, WeightSlot


class MLP:
    """Computes `down(silu(gate(x)) * up(x))`, with gate and up in one GEMM."""

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
        is_quantized, dtype = build.quantization is not None, dtype_name(build.dtype)
        whole = quantized_op(build, "add_rms_norm_mlp")
        self._norm_mlp = (
            None
            if whole == "add_rms_norm_mlp"
            else build.op(whole, hidden_size=hidden_size, size=intermediate_size, dtype=dtype)
        )
        self._normed_gate_up = NormedLinear(build, self.gate_up, is_gated=not is_quantized)
        self._silu_mul = (
            build.op(quantized_op(build, "silu_mul"), size=intermediate_size, dtype=dtype)
            if is_quantized
            else None
        )

    def __call__(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [T, hidden] for the normalised x + residual [T, hidden], and that sum.

        The sum may overwrite the residual.
        """
        if self._norm_mlp is not None:
            result: tuple[torch.Tensor, torch.Tensor] = self._norm_mlp(
                x, residual, norm.weight, norm.eps, *self.gate_up.operands, *self.down.operands
            )
            return result
        gated: Activation
        gated, residual = self._normed_gate_up(norm, x, residual)
        if self._silu_mul is not None:
            gated = self._silu_mul(gated)
        return self.down(gated), residual

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """List the weights of the three projections."""
        yield from self.gate_up.slots(prefix)
        yield from self.down.slots(prefix)

    def sharding(self, prefix: str) -> Iterator[ShardingSpec]:
        """Intermediate features are sharded over the dense group; the output is a partial sum."""
        yield ShardingSpec(f"{prefix}gate_up", "dense", Replicated(), Sharded("features"))
        yield ShardingSpec(f"{prefix}down", "dense", Sharded("features"), Partial())
