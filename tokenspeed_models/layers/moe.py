"""A mixture of experts in place of the MLP."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers.linear import Linear, Projection, dtype_name
from tokenspeed_models.layers.norm import RMSNorm
from tokenspeed_models.placement import Boundary, Partial, Replicated
from tokenspeed_models.weights import Shard, WeightSlot


class MoE:
    """Routes each token to its `top_k` likeliest experts and sums their gated MLPs, weighted."""

    def __init__(
        self, build: BuildContext, hidden_size: int, intermediate_size: int, *, num_experts: int, top_k: int,
        renormalize: bool,
    ) -> None:
        if build.quantization is not None:
            raise ValueError(
                f"--quantization {build.quantization.name} computes no experts yet, which this model has; leave it out"
            )
        dtype = dtype_name(build.dtype)
        self.num_experts, self.intermediate_size = num_experts, intermediate_size
        self.top_k, self.renormalize = top_k, renormalize
        self.router = Linear(build, hidden_size, (Projection("gate", num_experts, None),))
        self.gate_up = torch.empty(
            num_experts, 2 * intermediate_size, hidden_size, dtype=build.dtype, device=build.device)
        self.down = torch.empty(
            num_experts, hidden_size, intermediate_size, dtype=build.dtype, device=build.device)
        self._route = build.op("moe_route", num_experts=num_experts, top_k=top_k, dtype=dtype)
        self._experts = build.op("moe_experts", num_experts=num_experts, top_k=top_k, hidden_size=hidden_size,
                                 intermediate_size=intermediate_size, dtype=dtype)

    def __call__(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the map [T, hidden] of x + residual [T, hidden], normalised; and that sum, over the residual."""
        x, residual = norm.add(x, residual)
        weights, ids = self._route(self.router(x), self.top_k, self.renormalize)
        result: torch.Tensor = self._experts(x, self.gate_up, self.down, weights, ids)
        return result, residual

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """List the router and the experts: one by one, or stacked in two tensors as newer writers do."""
        yield from self.router.slots(prefix)
        gate_up_names, down_names = [], []
        for expert in range(self.num_experts):
            name = f"{prefix}experts.{expert}"
            gate, up = torch.split(self.gate_up[expert], self.intermediate_size)
            gate_up_names += [f"{name}.gate_proj.weight", f"{name}.up_proj.weight"]
            down_names.append(f"{name}.down_proj.weight")
            yield WeightSlot(gate_up_names[-2], gate, Shard(0, "moe"))
            yield WeightSlot(gate_up_names[-1], up, Shard(0, "moe"))
            yield WeightSlot(down_names[-1], self.down[expert], Shard(1, "moe"))
        yield WeightSlot(f"{prefix}experts.gate_up_proj", self.gate_up, Shard(1, "moe"),
                         replaces=tuple(gate_up_names))
        yield WeightSlot(f"{prefix}experts.down_proj", self.down, Shard(2, "moe"), replaces=tuple(down_names))

    def boundaries(self, prefix: str) -> Iterator[Boundary]:
        """Routing is computed everywhere alike; the experts' results are summands."""
        yield Boundary(f"{prefix}gate", "moe", Replicated(), Replicated())
        yield Boundary(f"{prefix}experts", "moe", Replicated(), Partial())
