"""The experts of a gpt-oss layer: gated MLPs with biases and a clamped SwiGLU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers import RMSNorm, Router, shared_scheme
from tokenspeed_models.layers.ops import dtype_name
from tokenspeed_models.sharding import Partial, Replicated, ShardingSpec
from tokenspeed_models.weights import Shard, WeightSlot
from tokenspeed_models_gpt_oss.describe import GptOssConfig

_OP = "moe_biased_experts"
_GROUP = 32  # MXFP4 values that share a scale
_DUMMY_EXPONENT = 120  # gives random values a deviation of about 0.02


class ExpertWeight:
    """The weights [E, O, I] of all experts, unquantized or in MXFP4.

    Checkpoints store unquantized weights transposed, and MXFP4 as blocks of 32 values with a scale each.
    """

    def __init__(
        self, build: BuildContext, num_experts: int, rows: int, size: int, *, is_mxfp4: bool
    ) -> None:
        if is_mxfp4 and size % _GROUP:
            raise ValueError(
                f"config.json: MXFP4 needs sizes that are multiples of {_GROUP}, and an expert has {size} input "
                "features. Use an unquantized checkpoint."
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

    def slots(self, name: str, axis: int) -> Iterator[WeightSlot]:
        """List the weights; `axis` is the one of [E, O, I] that is sharded."""
        if self.scale is None:
            yield WeightSlot(name, self.values.transpose(1, 2), Shard(3 - axis, "moe"))
        else:
            blocks, shard = self.values.view(*self._groups, _GROUP // 2), Shard(axis, "moe")
            dummy = partial(torch.full_like, self.scale, _DUMMY_EXPONENT)
            yield WeightSlot(f"{name}_blocks", blocks, shard, "quantized")
            yield WeightSlot(
                f"{name}_scales", self.scale, shard, "scale", make_dummy=lambda generator: dummy()
            )
        yield WeightSlot(f"{name}_bias", self.bias, Shard(1, "moe") if axis == 1 else None, "bias")


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
        self.gate_up, self.down = weight(2 * inner, hidden_size), weight(hidden_size, inner)
        self._operands = (*self.gate_up.operands, *self.down.operands)
        self._experts = build.op(
            op,
            num_experts=num_experts,
            top_k=c.moe.routing.top_k,
            hidden_size=hidden_size,
            intermediate_size=inner,
            alpha=c.alpha,
            limit=c.limit,
            dtype=dtype_name(build.dtype),
        )

    def __call__(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [T, hidden] for the normalised x + residual [T, hidden], and that sum.

        The sum overwrites the residual.
        """
        x, residual = norm.add(x, residual)
        weights, ids = self.router(x)
        return self._experts(x, *self._operands, weights, ids), residual

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """List the weights of the router and the experts."""
        yield from self.router.slots(prefix)
        yield from self.gate_up.slots(f"{prefix}experts.gate_up_proj", axis=1)
        yield from self.down.slots(f"{prefix}experts.down_proj", axis=2)

    def sharding(self, prefix: str) -> Iterator[ShardingSpec]:
        """Routing is replicated; the experts' output is a partial sum."""
        yield ShardingSpec(f"{prefix}gate", "moe", Replicated(), Replicated())
        yield ShardingSpec(f"{prefix}experts", "moe", Replicated(), Partial())
