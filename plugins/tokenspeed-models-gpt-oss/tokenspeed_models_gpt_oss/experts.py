"""The experts of a gpt-oss layer: gated MLPs with biases and a clamped SwiGLU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers import LocalExperts, local_experts, shared_scheme
from tokenspeed_models.layers.ops import dtype_name
from tokenspeed_models.weights import Shard, WeightSlot
from tokenspeed_models_gpt_oss.describe import GptOssConfig

_OP = "moe_biased_experts"
_GROUP = 32  # MXFP4 values that share a scale
_DUMMY_EXPONENT = 120  # gives random values a deviation of about 0.02


class ExpertWeight:
    """The weights [E, O, I] of this process's experts, unquantized or in MXFP4.

    Checkpoints store unquantized weights transposed, and MXFP4 as blocks of 32 values with a scale each. `axis` is the
    one of [E, O, I] that the processes of the group "moe" share; the numbers are those of all processes.
    """

    def __init__(
        self,
        build: BuildContext,
        local: LocalExperts,
        rows: int,
        size: int,
        *,
        axis: int,
        is_mxfp4: bool,
    ) -> None:
        self._axis, self._build, features = axis, build, Shard(axis, "moe")
        self._num_experts, num_slots = local.num, local.num_slots
        if axis == 1:
            rows = features.local_size("experts.gate_up_proj", rows, build.group)
        else:
            size = features.local_size("experts.down_proj", size, build.group)
        if is_mxfp4 and size % _GROUP:
            raise ValueError(
                f"config.json: MXFP4 needs sizes that are multiples of {_GROUP}, and an expert has {size} input "
                "features per process. Use a smaller --moe-tp-size, --enable-expert-parallel, or an unquantized "
                "checkpoint."
            )
        groups = (num_slots, rows, size // _GROUP)
        make = partial(torch.empty, device=build.device)
        self.scale = make(groups, dtype=torch.uint8) if is_mxfp4 else None
        self.values = (
            make((num_slots, rows, size // 2), dtype=torch.uint8)
            if is_mxfp4
            else make((num_slots, rows, size), dtype=build.dtype)
        )
        self.bias = make((num_slots, rows), dtype=build.dtype)

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        """The arguments that the op takes for this weight."""
        return (self.values, *(() if self.scale is None else (self.scale,)), self.bias)

    def slots(self, name: str) -> Iterator[WeightSlot]:
        """List the weights. Slots for replicas of experts are not loaded."""
        experts, features = Shard(0, "experts"), Shard(self._axis, "moe")
        values, bias = self.values[: self._num_experts], self.bias[: self._num_experts]
        if self.scale is None:
            shards = experts, Shard(3 - self._axis, "moe")
            yield WeightSlot(name, values.transpose(1, 2), shards)
        else:
            scale, shards = self.scale[: self._num_experts], (experts, features)
            blocks = values.view(*scale.shape, _GROUP // 2)
            yield WeightSlot(f"{name}_blocks", blocks, shards, "quantized")
            make_dummy = partial(_make_dummy_scales, scale.device)
            yield WeightSlot(f"{name}_scales", scale, shards, "scale", make_dummy=make_dummy)
        name = f"{name}_bias"
        if self._axis == 1:
            yield WeightSlot(name, bias, (experts, features), "bias")
        elif self._build.group("moe").rank == 0:
            yield WeightSlot(name, bias, experts, "bias")
        else:  # the first process adds it
            yield WeightSlot(name, bias, experts, "bias", on_load=self._clear_bias)

    def _clear_bias(self, bias: torch.Tensor) -> None:
        self.bias.zero_()


def _make_dummy_scales(
    device: torch.device, shape: torch.Size, generator: torch.Generator
) -> torch.Tensor:
    return torch.full(shape, _DUMMY_EXPONENT, dtype=torch.uint8, device=device)


class GptOssExperts:
    """Gated MLPs with biases, of which each token uses some; the result is their weighted sum.

    The rows of gate and up alternate, as in the checkpoints.
    """

    def __init__(self, build: BuildContext, c: GptOssConfig) -> None:
        inner, routing = c.moe.intermediate_size, c.moe.routing
        self.num_experts, self.hidden_size = routing.num_experts, c.decoder.hidden_size
        scheme = shared_scheme(build, ("experts.gate_up_proj", "experts.down_proj"))
        op = _OP if scheme is None else scheme.fused.get(_OP)
        if scheme is not None and op is None:
            raise ValueError(
                f"quantization {scheme.name} does not support the experts of gpt-oss. Use the published checkpoint in "
                "MXFP4, or an unquantized one without --quantization."
            )
        assert op is not None, "unquantized experts have an op"
        self.local = local_experts(build, self.num_experts)
        weight = partial(ExpertWeight, build, self.local, is_mxfp4=scheme is not None)
        self.gate_up = weight(2 * inner, self.hidden_size, axis=1)
        self.down = weight(self.hidden_size, inner, axis=2)
        self._operands = (*self.gate_up.operands, *self.down.operands)
        self.local.let_move(self._operands)
        self._experts = build.op(
            op,
            num_experts=self.local.num_slots,
            top_k=routing.top_k,
            hidden_size=self.hidden_size,
            intermediate_size=self.gate_up.bias.shape[1] // 2,
            alpha=c.alpha,
            limit=c.limit,
            dtype=dtype_name(build.dtype),
        )

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """See `RoutedExperts`."""
        if not self.local.is_all:
            ids = self.local.choose(ids)
        result: torch.Tensor = self._experts(x, *self._operands, weights, ids)
        return result

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """List the weights."""
        yield from self.gate_up.slots(f"{prefix}experts.gate_up_proj")
        yield from self.down.slots(f"{prefix}experts.down_proj")
