"""The experts of a layer: their weights, which may be quantized, and the op that runs them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tokenspeed_core.api import BuildContext, QuantizationScheme, prepare_weights
from tokenspeed_models.layers.local_experts import local_experts
from tokenspeed_models.layers.ops import dtype_name
from tokenspeed_models.layers.packed_weight import PackedWeight
from tokenspeed_models.layers.quantized_weight import QuantizedWeight
from tokenspeed_models.layers.scheme import full_name, shared_scheme
from tokenspeed_models.weights import Shard, StackedShard, WeightSlot


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

    The processes of the group "experts" divide the experts, and those of "moe" divide the features of each expert. The
    result is a partial sum. Raises ValueError if the experts are quantized by different schemes, or by a scheme without
    an op for experts, or if the processes cannot divide them.
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
        self.local = local_experts(build, num_experts)
        self._columns = Shard(0, "moe")
        self._stacked = StackedShard((2 * ((intermediate_size, self._columns),)), 1)
        name = full_name(build, "experts")
        intermediate_size = self._columns.local_size(name, intermediate_size, build.group)
        self.intermediate_size = intermediate_size
        scheme = shared_scheme(build, self._layer_names())
        op = "moe_experts" if scheme is None else scheme.fused.get("moe_experts")
        if scheme is not None and op is None:
            raise ValueError(
                f"quantization {scheme.name} does not support models with experts. Use an unquantized checkpoint, or "
                "another quantization."
            )
        assert op is not None, "unquantized experts have an op"
        _check_blocks_are_whole(build, scheme, intermediate_size)
        gate_up_shape = self.local.num_slots, 2 * intermediate_size, hidden_size
        down_shape = self.local.num_slots, hidden_size, intermediate_size
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
        if build.expert_balance is not None:
            self.local.let_move(self._movable_weights(scheme))
        self._experts = build.op(
            op,
            num_experts=self.local.num_slots,
            top_k=top_k,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            dtype=dtype_name(build.dtype),
            **({} if scheme is None else scheme.problem),
        )

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the sum [T, hidden] of the experts `ids`, int32 [T, k], times `weights`, float32, for x [T, hidden].

        With several processes it has the terms of this one.
        """
        if not self.local.is_all:
            ids = self.local.choose(ids)
        result: torch.Tensor = self._experts(x, *self._operands, weights, ids)
        return result

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """List the weights, both as one tensor per expert and as two stacked tensors."""
        layers = [f"{prefix}{name}" for name in self._layer_names()]
        local = self.local.take(layers)
        for name in layers if not self.local.is_all else ():
            if name not in local:
                yield WeightSlot(f"{name}.", self.gate_up, None, is_optional=True)
        for expert in range(self.local.num):
            yield from self._expert_slots(expert, *local[3 * expert : 3 * expert + 3])
        weights = [f"{name}.weight" for name in local]
        downs = weights[2::3]
        gate_ups = [name for index, name in enumerate(weights) if index % 3 != 2]
        names = self._names
        for index, weight, name, shard, replaces in (
            (0, self.gate_up, f"{prefix}{names.stacked_gate_up}", self._stacked, gate_ups),
            (1, self.down, f"{prefix}{names.stacked_down}", Shard(2, "moe"), downs),
        ):
            shards = (Shard(0, "experts"), shard)
            if self._quantized is None:
                weight = weight[: self.local.num]
                yield WeightSlot(name, weight, shards, replaces=tuple(replaces))
            else:
                yield from self._quantized[index].stacked_slots(
                    name, self.local.num, shards, tuple(replaces)
                )

    def _prepare(self) -> None:
        """Let the kernel change the layout of the loaded weights."""
        prepare_weights(self._experts, self.gate_up, self.down)

    def _movable_weights(self, scheme: QuantizationScheme | None) -> tuple[torch.Tensor, ...]:
        """Return the weights with their scales. Raises ValueError if other tensors depend on which experts are here."""
        has_shared = scheme is not None and (
            scheme.has_tensor_scales
            or (scheme.packing is not None and len(scheme.packing.input_operands) > 0)
        )
        if has_shared:
            assert scheme is not None
            raise ValueError(
                f"--enable-eplb: experts in {scheme.name} cannot be moved, because they share scales. Supported: "
                "unquantized experts, FP8 with scales per channel or block, and 4-bit weights with 16-bit activations."
            )
        return tuple(each for each in self._operands if each is not None)

    def _layer_names(self) -> Iterator[str]:
        """Yield the names of the linear layers of all experts: gate, up and down of each."""
        names = self._names
        for expert in range(self.num_experts):
            for name in (names.gate, names.up, names.down):
                yield name.format(expert)

    def _expert_slots(self, expert: int, gate: str, up: str, down: str) -> Iterator[WeightSlot]:
        """List the three projections, called `gate`, `up` and `down`, of one of this process's experts."""
        size = self.intermediate_size
        first, second, whole = slice(0, size), slice(size, 2 * size), slice(0, self.hidden_size)
        columns, rows = self._columns, Shard(1, "moe")
        if self._quantized is None:
            yield WeightSlot(f"{gate}.weight", self.gate_up[expert, first], columns)
            yield WeightSlot(f"{up}.weight", self.gate_up[expert, second], columns)
            name = f"{down}.weight"
            yield WeightSlot(name, self.down[expert], rows, on_complete=self._prepare)
        else:
            gate_up_weight, down_weight = self._quantized
            yield from gate_up_weight.slots(gate, first, columns, 0, expert)
            yield from gate_up_weight.slots(up, second, columns, 1, expert)
            yield from down_weight.slots(down, whole, rows, 0, expert)


def _check_blocks_are_whole(
    build: BuildContext, scheme: QuantizationScheme | None, intermediate_size: int
) -> None:
    """Raise ValueError if a block of values that shares a scale is divided between processes."""
    group = build.group("moe")
    if scheme is None or group.size == 1:
        return
    block = _scale_block(scheme)
    if intermediate_size % block:
        raise ValueError(
            f"quantization {scheme.name}: experts have {intermediate_size} features on each of "
            f"{group}, and blocks of {block} share a scale. Use fewer processes, or "
            "--enable-expert-parallel."
        )


def _scale_block(scheme: QuantizationScheme) -> int:
    """Return the number of features of an expert that share a scale, 1 if all or none of them do."""
    if scheme.packing is None:
        return max(scheme.scale_block or (1,))
    scales = [each for each in scheme.packing.stored if each.kind == "scale"]
    return max([1, *(axis.per for each in scales for axis in each.axes if axis.of == "in")])
