"""The gated MLP of a decoder layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tokenspeed_core.api import BuildContext, FusedCollective
from tokenspeed_models.layers.linear import Activation, Linear, Projection, stacked
from tokenspeed_models.layers.norm import NormedLinear, RMSNorm
from tokenspeed_models.layers.ops import dtype_name
from tokenspeed_models.layers.summed import send_in_parts, sum_before
from tokenspeed_models.sharding import Partial, Replicated, Sharded, ShardingSpec
from tokenspeed_models.weights import Shard, WeightSlot


class MLP:
    """Computes `down(activation(gate(x)) * up(x))`, with gate and up in one GEMM.

    `activation` is "silu" or "gelu_tanh". `stacked_name` is the checkpoint's name of gate and up if it stores them as
    one tensor. In a layer without a norm before its blocks `has_norm` is False. `intermediate_size` is that of all
    processes of the group "dense".
    """

    def __init__(
        self,
        build: BuildContext,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        activation: str = "silu",
        stacked_name: str | None = None,
        has_norm: bool = True,
    ) -> None:
        columns, rows = Shard(0, "dense"), Shard(1, "dense")
        self.activation, self._hidden_size = activation, hidden_size
        self.gate_up = Linear(
            build,
            hidden_size,
            stacked(
                stacked_name,
                (
                    Projection("gate_proj", intermediate_size, columns),
                    Projection("up_proj", intermediate_size, columns),
                ),
            ),
            bias=bias,
        )
        self.down = Linear(
            build, intermediate_size, (Projection("down_proj", hidden_size, rows),), bias=bias
        )
        self._project_down: Callable[[Activation], Any] = self.down
        dtype = dtype_name(build.dtype)
        fused = {} if self.down.scheme is None else self.down.scheme.fused
        whole = fused.get("add_rms_norm_mlp") if self.gate_up.scheme == self.down.scheme else None
        self._norm_mlp = (
            build.op(whole, hidden_size=hidden_size, size=self.down.in_size, dtype=dtype)
            if whole is not None and activation == "silu" and has_norm
            else None
        )
        is_gate_fused = has_norm and self.gate_up.scheme is None
        self._normed_gate_up = NormedLinear(
            build,
            self.gate_up,
            activation=activation if is_gate_fused else None,
            has_norm=has_norm,
        )
        self._gate = (
            None
            if is_gate_fused
            else build.op(
                fused.get(f"{activation}_mul", f"{activation}_mul"),
                size=self.down.in_size,
                dtype=dtype,
            )
        )

    def __call__(
        self, norm: RMSNorm | None, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [T, hidden] for the normalized x + residual [T, hidden], and that sum.

        Without a norm the sum itself is the input. It may overwrite the residual.
        """
        if self._norm_mlp is not None and norm is not None:
            result: tuple[torch.Tensor, torch.Tensor] = self._norm_mlp(
                x, residual, norm.weight, norm.eps, *self.gate_up.operands, *self.down.operands
            )
            return result
        gated: Activation
        gated, residual = self._normed_gate_up(norm, x, residual)
        if self._gate is not None:
            gated = self._gate(gated)
        return self._project_down(gated), residual

    @property
    def fused_op(self) -> str:
        """The op that adds up and normalizes summands for the MLP (see `TakesSummands`)."""
        return self._normed_gate_up.fused_op

    def fuse_sum(self, build: BuildContext, fused: FusedCollective) -> None:
        """Take summands as x, which the norm adds up (see `TakesSummands`)."""
        gate = self._gate
        if gate is None:
            self._normed_gate_up.fuse_sum(fused, self._gate_of_normed(build))
            return
        if self._norm_mlp is None:
            self._normed_gate_up.fuse_sum(fused)
            return

        def of_normed(x: Activation) -> Any:
            return self._project_down(gate(self.gate_up(x)))

        self._norm_mlp = sum_before(fused, self._norm_mlp, of_normed)

    def _gate_of_normed(self, build: BuildContext) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function from normalized x [T, hidden] to activation(gate) * up [T, intermediate]."""
        linear, size, dtype = self.gate_up, self.down.in_size, dtype_name(build.dtype)
        if self.activation == "silu" and linear.bias is None:
            fused = build.fused(
                "linear_silu_mul", in_size=linear.in_size, out_size=size, dtype=dtype
            )
            if fused is not None:
                return lambda x: fused(x, linear.weight)
        gate = build.op(f"{self.activation}_mul", size=size, dtype=dtype)
        return lambda x: gate(linear(x))

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """List the weights of the three projections."""
        yield from self.gate_up.slots(prefix)
        yield from self.down.slots(prefix)

    def sharding(self, prefix: str) -> Iterator[ShardingSpec]:
        """Intermediate features are sharded over the dense group; the output is a partial sum."""
        features = Sharded("features", "dense")
        yield ShardingSpec(f"{prefix}gate_up", Replicated(), features, self.gate_up.out_size)
        yield ShardingSpec(
            f"{prefix}down",
            features,
            Partial(("dense",)),
            self._hidden_size,
            send_parts=self._send_parts,
        )

    def _send_parts(self, fused: FusedCollective) -> None:
        self._project_down = send_in_parts(self.down, fused)
