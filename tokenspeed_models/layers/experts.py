"""The experts of a layer: their weights, quantized if the build says so, and the op that runs them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers.ops import dtype_name
from tokenspeed_models.layers.packed_weight import PackedWeight
from tokenspeed_models.layers.quantized_weight import QuantizedWeight
from tokenspeed_models.layers.scheme import shared_scheme
from tokenspeed_models.weights import Shard, WeightSlot


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names in a checkpoint: of the layers of one expert, with {} for its number, and of the stacked tensors."""

    gate: str = "experts.{}.gate_proj"
    up: str = "experts.{}.up_proj"
    down: str = "experts.{}.down_proj"
    stacked_gate_up: str = "experts.gate_up_proj"
    stacked_down: str = "experts.down_proj"


class Experts:
    """Gated MLPs, of which each token uses some; the result is their weighted sum.

    Raises ValueError if the experts are quantized by different schemes, or by one without an op for experts.
    """

    def __init__(
        self,
        build: BuildContext,
        *,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        names: ExpertNames | None = None,
    ) -> None:
        self._names = names or ExpertNames()
        self.num_experts, self.hidden_size = num_experts, hidden_size
        self.intermediate_size = intermediate_size
        scheme = shared_scheme(build, self._layer_names())
        op = "moe_experts" if scheme is None else scheme.fused.get("moe_experts")
        if scheme is not None and op is None:
            raise ValueError(
                f"quantization {scheme.name} does not support models with experts. Use an unquantized checkpoint, or "
                "another quantization."
            )
        assert op is not None, "unquantized experts have an op"
        gate_up_shape = num_experts, 2 * intermediate_size, hidden_size
        down_shape = num_experts, hidden_size, intermediate_size
        self._quantized: tuple[QuantizedWeight | PackedWeight, ...] | None = None
        self._operands: tuple[torch.Tensor | None, ...]
        if scheme is None:
            self.gate_up = torch.empty(gate_up_shape, dtype=build.dtype, device=build.device)
            self.down = torch.empty(down_shape, dtype=build.dtype, device=build.device)
            self._operands = (self.gate_up, self.down)
        elif scheme.packing is not None:
            packed = tuple(PackedWeight(build, scheme, *s) for s in (gate_up_shape, down_shape))
            self.gate_up, self.down = (each.weight for each in packed)
            self._quantized = packed
            self._operands = tuple(
                operand for each in packed for operand in (*each.input_operands, *each.operands)
            )
        else:
            gate_up = QuantizedWeight(build, scheme, *gate_up_shape, num_projections=2)
            down = QuantizedWeight(build, scheme, *down_shape, previous=gate_up)
            self.gate_up, self.down = gate_up.values, down.values
            self._quantized = gate_up, down
            self._operands = (*gate_up.operands, *down.operands)
        self._experts = build.op(
            op,
            num_experts=num_experts,
            top_k=top_k,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            dtype=dtype_name(build.dtype),
            **({} if scheme is None else scheme.problem),
        )

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the sum [T, hidden] of the experts `ids`, int32 [T, k], times `weights`, float32, for x [T, hidden]."""
        result: torch.Tensor = self._experts(x, *self._operands, weights, ids)
        return result

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """List the weights, both as one tensor per expert and as two stacked tensors."""
        for expert in range(self.num_experts):
            yield from self._expert_slots(prefix, expert)
        names = self._names
        layers = [f"{prefix}{name}.weight" for name in self._layer_names()]
        downs = layers[2::3]
        gate_ups = [name for index, name in enumerate(layers) if index % 3 != 2]
        for index, weight, name, shard, replaces in (
            (0, self.gate_up, f"{prefix}{names.stacked_gate_up}", Shard(1, "moe"), gate_ups),
            (1, self.down, f"{prefix}{names.stacked_down}", Shard(2, "moe"), downs),
        ):
            if self._quantized is None:
                yield WeightSlot(name, weight, shard, replaces=tuple(replaces))
            else:
                yield from self._quantized[index].stacked_slots(name, shard, tuple(replaces))

    def _layer_names(self) -> Iterator[str]:
        """Yield the names of the linear layers of all experts: gate, up and down of each."""
        names = self._names
        for expert in range(self.num_experts):
            for name in (names.gate, names.up, names.down):
                yield name.format(expert)

    def _expert_slots(self, prefix: str, expert: int) -> Iterator[WeightSlot]:
        """List the three projections of one expert."""
        size, names = self.intermediate_size, self._names
        gate, up, down = (
            f"{prefix}{name.format(expert)}" for name in (names.gate, names.up, names.down)
        )
        first, second, whole = slice(0, size), slice(size, 2 * size), slice(0, self.hidden_size)
        columns, rows = Shard(0, "moe"), Shard(1, "moe")
        if self._quantized is None:
            yield WeightSlot(f"{gate}.weight", self.gate_up[expert, first], columns)
            yield WeightSlot(f"{up}.weight", self.gate_up[expert, second], columns)
            yield WeightSlot(f"{down}.weight", self.down[expert], rows)
        else:
            gate_up_weight, down_weight = self._quantized
            yield from gate_up_weight.slots(gate, first, columns, 0, expert)
            yield from gate_up_weight.slots(up, second, columns, 1, expert)
            yield from down_weight.slots(down, whole, rows, 0, expert)
