"""A mixture of experts, which replaces the MLP of a decoder layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers.ignored_modules import UnquantizedBuild
from tokenspeed_models.layers.linear import Linear, Projection
from tokenspeed_models.layers.norm import RMSNorm
from tokenspeed_models.layers.ops import dtype_name, quantized_op
from tokenspeed_models.layers.quantized_weight import QuantizedWeight
from tokenspeed_models.sharding import Partial, Replicated, ShardingSpec
from tokenspeed_models.weights import Shard, WeightSlot


class MoE:
    """Routes each token to its top-k experts and returns the weighted sum of their gated MLPs."""

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
        op = quantized_op(build, "moe_experts")
        if method is not None and op == "moe_experts":
            raise ValueError(
                f"--quantization {method.name} does not support models with experts. Leave the flag out."
            )
        self.num_experts, self.intermediate_size = num_experts, intermediate_size
        self.top_k, self.renormalize = top_k, renormalize
        self.router = Linear(
            UnquantizedBuild(build), hidden_size, (Projection("gate", num_experts, None),)
        )
        gate_up_shape = num_experts, 2 * intermediate_size, hidden_size
        down_shape = num_experts, hidden_size, intermediate_size
        self._quantized: tuple[QuantizedWeight, QuantizedWeight] | None = None
        self._operands: tuple[torch.Tensor, ...]
        if method is None:
            self.gate_up = torch.empty(gate_up_shape, dtype=build.dtype, device=build.device)
            self.down = torch.empty(down_shape, dtype=build.dtype, device=build.device)
            self._operands = (self.gate_up, self.down)
        else:
            gate_up = QuantizedWeight(build, method, *gate_up_shape, num_projections=2)
            down = QuantizedWeight(build, method, *down_shape, previous=gate_up)
            self.gate_up, self.down = gate_up.values, down.values
            self._quantized = gate_up, down
            self._operands = (*gate_up.operands, *down.operands)
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
        """Return the output [T, hidden] for the normalised x + residual [T, hidden], and that sum.

        The sum overwrites the residual.
        """
        x, residual = norm.add(x, residual)
        weights, ids = self._route(self.router(x), self.top_k, self.renormalize)
        result: torch.Tensor = self._experts(x, *self._operands, weights, ids)
        return result, residual

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """List the router and the experts, both as one tensor per expert and as two stacked tensors."""
        yield from self.router.slots(prefix)
        gate_up_names, down_names = [], []
        for expert in range(self.num_experts):
            name = f"{prefix}experts.{expert}"
            gate_up_names += [f"{name}.gate_proj.weight", f"{name}.up_proj.weight"]
            down_names += [f"{name}.down_proj.weight"]
            yield from self._expert_slots(name, expert)
        gate_up_shard, down_shard = Shard(1, "moe"), Shard(2, "moe")
        for index, weight, name, shard, replaces in (
            (0, self.gate_up, f"{prefix}experts.gate_up_proj", gate_up_shard, gate_up_names),
            (1, self.down, f"{prefix}experts.down_proj", down_shard, down_names),
        ):
            if self._quantized is None:
                yield WeightSlot(name, weight, shard, replaces=tuple(replaces))
            else:
                yield from self._quantized[index].stacked_slots(name, shard, tuple(replaces))

    def _expert_slots(self, name: str, expert: int) -> Iterator[WeightSlot]:
        """List the three projections of one expert."""
        size = self.intermediate_size
        gate, up, down = slice(0, size), slice(size, 2 * size), slice(0, self.router.in_size)
        columns, rows = Shard(0, "moe"), Shard(1, "moe")
        if self._quantized is None:
            yield WeightSlot(f"{name}.gate_proj.weight", self.gate_up[expert, gate], columns)
            yield WeightSlot(f"{name}.up_proj.weight", self.gate_up[expert, up], columns)
            yield WeightSlot(f"{name}.down_proj.weight", self.down[expert], rows)
        else:
            gate_up_weight, down_weight = self._quantized
            yield from gate_up_weight.slots(f"{name}.gate_proj", gate, columns, 0, expert)
            yield from gate_up_weight.slots(f"{name}.up_proj", up, columns, 1, expert)
            yield from down_weight.slots(f"{name}.down_proj", down, rows, 0, expert)

    def sharding(self, prefix: str) -> Iterator[ShardingSpec]:
        """Routing is replicated; the experts' output is a partial sum."""
        yield ShardingSpec(f"{prefix}gate", "moe", Replicated(), Replicated())
        yield ShardingSpec(f"{prefix}experts", "moe", Replicated(), Partial())
