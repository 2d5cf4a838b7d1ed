"""A mixture of experts in place of the MLP."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers.linear import Linear, Projection, fused_op
from tokenspeed_models.layers.norm import RMSNorm
from tokenspeed_models.layers.packed import PackedWeight, dtype_name
from tokenspeed_models.placement import Boundary, Partial, Replicated
from tokenspeed_models.weights import Shard, WeightSlot


class MoE:
    """Routes each token to its `top_k` likeliest experts and sums their gated MLPs, weighted."""

    def __init__(
        self,
        build: BuildContext,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        top_k: int,
        renormalize: bool,
    ) -> None:
        method, dtype = build.quantization, dtype_name(build.dtype)
        op = fused_op(build, "moe_experts")
        if method is not None and op == "moe_experts":
            raise ValueError(
                f"--quantization {method.name} computes no experts yet, which this model has; leave it out"
            )
        self.num_experts, self.intermediate_size = num_experts, intermediate_size
        self.top_k, self.renormalize = top_k, renormalize
        self.router = Linear(
            build, hidden_size, (Projection("gate", num_experts, None),), is_whole=True
        )
        both = num_experts, 2 * intermediate_size, hidden_size
        last = num_experts, hidden_size, intermediate_size
        self._operands: tuple[torch.Tensor, ...]
        if method is None:
            self.gate_up, self.down = (
                torch.empty(shape, dtype=build.dtype, device=build.device) for shape in (both, last)
            )
            self._packed, self._operands = None, (self.gate_up, self.down)
        else:
            first = PackedWeight(build, method, *both, num_parts=2)
            self._packed = first, PackedWeight(build, method, *last, before=first)
            self.gate_up, self.down = (packed.codes for packed in self._packed)
            self._operands = tuple(
                operand for packed in self._packed for operand in packed.operands
            )
        self._route = build.op("moe_route", num_experts=num_experts, top_k=top_k, dtype=dtype)
        self._experts = build.op(
            op,
            num_experts=num_experts,
            top_k=top_k,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            dtype=dtype,
        )

    def __call__(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the map [T, hidden] of x + residual [T, hidden], normalised; and that sum, over the residual."""
        x, residual = norm.add(x, residual)
        weights, ids = self._route(self.router(x), self.top_k, self.renormalize)
        result: torch.Tensor = self._experts(x, *self._operands, weights, ids)
        return result, residual

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """List the router and the experts: one by one, or stacked in two tensors as newer writers do."""
        yield from self.router.slots(prefix)
        size, weights = self.intermediate_size, (self.gate_up, self.down)
        stacked: tuple[list[str], list[str]] = [], []
        for expert in range(self.num_experts):
            for projection, index, part, rows, axis in (
                ("gate_proj", 0, 0, slice(0, size), 0),
                ("up_proj", 0, 1, slice(size, 2 * size), 0),
                ("down_proj", 1, 0, slice(0, self.router.in_size), 1),
            ):
                name, shard = f"{prefix}experts.{expert}.{projection}", Shard(axis, "moe")
                stacked[index].append(f"{name}.weight")
                if self._packed is None:
                    yield WeightSlot(f"{name}.weight", weights[index][expert, rows], shard)
                else:
                    yield from self._packed[index].slots(name, rows, shard, part, expert)
        for index, (name, axis) in enumerate((("gate_up_proj", 1), ("down_proj", 2))):
            name, shard, replaces = (
                f"{prefix}experts.{name}",
                Shard(axis, "moe"),
                tuple(stacked[index]),
            )
            if self._packed is None:
                yield WeightSlot(name, weights[index], shard, replaces=replaces)
            else:
                yield from self._packed[index].stacked_slots(name, shard, replaces)

    def boundaries(self, prefix: str) -> Iterator[Boundary]:
        """Routing is computed everywhere alike; the experts' results are summands."""
        yield Boundary(f"{prefix}gate", "moe", Replicated(), Replicated())
        yield Boundary(f"{prefix}experts", "moe", Replicated(), Partial())
