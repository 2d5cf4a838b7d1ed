"""The experts of a gpt-oss layer: gated MLPs with biases and a clamped SwiGLU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers import (
    LocalExperts,
    RMSNorm,
    Router,
    expert_sharding,
    shared_scheme,
)
from tokenspeed_models.layers.ops import dtype_name
from tokenspeed_models.sharding import ShardingSpec
from tokenspeed_models.weights import Shard, WeightSlot
from tokenspeed_models_gpt_oss.describe import GptOssConfig

_OP = "moe_biased_experts"
_GROUP = 32  # MXFP4 values that share a scale
_DUMMY_EXPONENT = 120  # gives random values a deviation of about 0.02


class ExpertWeight:
    """The weights [E, O, I] of all experts, unquantized or in MXFP4.

    Checkpoints store unquantized weights transposed, and MXFP4 as blocks of 32 values with a scale each. `axis` is the
    one of [E, O, I] that the processes of the group "moe" share; the numbers are those of all processes.
    """

    def __init__(
        self,
        build: BuildContext,
        num_experts: int,
        rows: int,
        size: int,
        *,
        axis: int,
        is_mxfp4: bool,
    ) -> None:
        self._axis, self._build, features = axis, build, Shard(axis, "moe")
        num_experts = Shard(0, "experts").local_size("experts", num_experts, build.group)
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
        self._groups = (num_experts, rows, size // _GROUP)
        self._shape = (num_experts, rows, size)
        make = partial(torch.empty, device=build.device)
        self.scale = make(self._groups, dtype=torch.uint8) if is_mxfp4 else None
        self.values = (
            make((num_experts, rows, size // 2), dtype=torch.uint8)
            if is_mxfp4
            else make(self._shape, dtype=build.dtype)
        )
        self.bias = make((num_experts, rows), dtype=build.dtype)

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        """The arguments that the op takes for this weight."""
        return (self.values, *(() if self.scale is None else (self.scale,)), self.bias)

    def slots(self, name: str) -> Iterator[WeightSlot]:
        """List the weights."""
        experts, features = Shard(0, "experts"), Shard(self._axis, "moe")
        if self.scale is None:
            shards = experts, Shard(3 - self._axis, "moe")
            yield WeightSlot(name, self.values.transpose(1, 2), shards)
        else:
            blocks, shards = self.values.view(*self._groups, _GROUP // 2), (experts, features)
            yield WeightSlot(f"{name}_blocks", blocks, shards, "quantized")
            make_dummy = partial(_make_dummy_scales, self.scale.device)
            yield WeightSlot(f"{name}_scales", self.scale, shards, "scale", make_dummy=make_dummy)
        name = f"{name}_bias"
        if self._axis == 1:
            yield WeightSlot(name, self.bias, (experts, features), "bias")
        elif self._build.group("moe").rank == 0:
            yield WeightSlot(name, self.bias, experts, "bias")
        else:  # the first process adds it
            yield WeightSlot(name, self.bias, experts, "bias", on_load=self._clear_bias)

    def _clear_bias(self, bias: torch.Tensor) -> None:
        self.bias.zero_()


def _make_dummy_scales(
    device: torch.device, shape: torch.Size, generator: torch.Generator
) -> torch.Tensor:
    return torch.full(shape, _DUMMY_EXPONENT, dtype=torch.uint8, device=device)


class GptOssExperts:
    """Routes each token to its top-k experts and returns the weighted sum of their outputs.

    The rows of gate and up alternate, as in the checkpoints.
    """

    def __init__(self, build: BuildContext, c: GptOssConfig) -> None:
        hidden_size, inner = c.decoder.hidden_size, c.moe.intermediate_size
        num_experts = c.moe.routing.num_experts
        scheme = shared_scheme(build, ("experts.gate_up_proj", "experts.down_proj"))
        op = _OP if scheme is None else scheme.fused.get(_OP)
        if scheme is not None and op is None:
            raise ValueError(
                f"quantization {scheme.name} does not support the experts of gpt-oss. Use the published checkpoint in "
                "MXFP4, or an unquantized one without --quantization."
            )
        assert op is not None, "unquantized experts have an op"
        self.router = Router(build, hidden_size, c.moe.routing, bias=c.moe.has_router_bias)
        weight = partial(ExpertWeight, build, num_experts, is_mxfp4=scheme is not None)
        self._local, self._num_experts = LocalExperts(build, num_experts), num_experts
        self._hidden_size = hidden_size
        self.gate_up = weight(2 * inner, hidden_size, axis=1)
        self.down = weight(hidden_size, inner, axis=2)
        self._operands = (*self.gate_up.operands, *self.down.operands)
        self._experts = build.op(
            op,
            num_experts=self._local.num,
            top_k=c.moe.routing.top_k,
            hidden_size=hidden_size,
            intermediate_size=self.gate_up.bias.shape[1] // 2,
            alpha=c.alpha,
            limit=c.limit,
            dtype=dtype_name(build.dtype),
        )

    def __call__(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [T, hidden] for the normalized x + residual [T, hidden], and that sum.

        The sum overwrites the residual.
        """
        x, residual = norm.add(x, residual)
        weights, ids = self.router(x)
        if not self._local.is_all:
            ids = self._local.choose(ids)
        return self._experts(x, *self._operands, weights, ids), residual

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """List the weights of the router and the experts."""
        yield from self.router.slots(prefix)
        yield from self.gate_up.slots(f"{prefix}experts.gate_up_proj")
        yield from self.down.slots(f"{prefix}experts.down_proj")

    def sharding(self, prefix: str) -> Iterator[ShardingSpec]:
        """Routing is replicated; the experts' output is a partial sum."""
        yield from expert_sharding(prefix, self._num_experts, self._hidden_size)
