"""A mixture of experts, which replaces the MLP of a decoder layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from math import comb
from typing import Protocol

import torch

from tokenspeed_core.api import FUSED_OP, BuildContext, FusedCollective
from tokenspeed_models.layers.experts import Experts
from tokenspeed_models.layers.linear import Activation, Linear, Projection
from tokenspeed_models.layers.local_experts import LocalExperts
from tokenspeed_models.layers.norm import RMSNorm
from tokenspeed_models.layers.ops import dtype_name
from tokenspeed_models.layers.scheme import ModuleBuild, UnquantizedBuild
from tokenspeed_models.moe_config import MoeConfig, RoutingConfig
from tokenspeed_models.sharding import Partial, Replicated, ShardingSpec
from tokenspeed_models.weights import Shard, WeightSlot

# Routing these numbers of tokens leaves most of a GPU idle, so that the shared experts run in parallel to it.
MIN_PARALLEL_TOKENS, MAX_PARALLEL_TOKENS = 17, 512


class WideGate:
    """The linear layer of a router that computes in float32 in a model of another dtype."""

    def __init__(self, build: BuildContext, in_size: int, num_experts: int) -> None:
        self.in_size = in_size
        self.weight = torch.empty(num_experts, in_size, dtype=torch.float32, device=build.device)
        self._logits = build.op(
            "moe_logits",
            num_experts=num_experts,
            hidden_size=in_size,
            dtype=dtype_name(build.dtype),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, float32 [T, E], for x [T, in]."""
        result: torch.Tensor = self._logits(x, self.weight)
        return result

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """List the weight."""
        yield WeightSlot(f"{prefix}gate.weight", self.weight, None)


class Router:
    """Chooses the experts of each token. With `is_wide` the logits are computed in float32."""

    def __init__(
        self,
        build: BuildContext,
        hidden_size: int,
        routing: RoutingConfig,
        *,
        bias: bool = False,
        is_wide: bool = False,
    ) -> None:
        num_experts = routing.num_experts
        is_wide = is_wide and build.dtype != torch.float32
        self.gate: Linear | WideGate
        if is_wide and bias:
            raise ValueError("a router with a bias cannot compute in float32")
        if is_wide:
            self.gate = WideGate(build, hidden_size, num_experts)
        else:
            self.gate = Linear(
                UnquantizedBuild(build),
                hidden_size,
                (Projection("gate", num_experts, None),),
                bias=bias,
            )
        self.choice_bias = (
            torch.empty(num_experts, dtype=torch.float32, device=build.device)
            if routing.has_bias
            else None
        )
        dtype = "float32" if is_wide else dtype_name(build.dtype)
        self._route = build.op("moe_route", **asdict(routing), dtype=dtype)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights, float32 [T, k], and ids, int32 [T, k], of the experts for x [T, hidden]."""
        result: tuple[torch.Tensor, torch.Tensor] = self._route(self.gate(x), self.choice_bias)
        return result

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """List the weights."""
        yield from self.gate.slots(prefix)
        if self.choice_bias is not None:
            yield WeightSlot(
                f"{prefix}gate.e_score_correction_bias", self.choice_bias, None, "bias"
            )


class SharedExperts:
    """A gated MLP that every token uses. With `is_gated` its output is multiplied by the sigmoid of a linear layer.

    All processes that share the layer's experts share its features. If tokens are routed, those of an engine do.
    """

    def __init__(
        self, build: BuildContext, hidden_size: int, intermediate_size: int, *, is_gated: bool
    ) -> None:
        module = ModuleBuild(build, "shared_experts")
        group = "world" if build.group("experts").size > 1 else "moe"
        if build.routes_tokens:
            group = "engine"
        columns, rows = Shard(0, group), Shard(1, group)
        self.gate_up = Linear(
            module,
            hidden_size,
            (
                Projection("gate_proj", intermediate_size, columns),
                Projection("up_proj", intermediate_size, columns),
            ),
        )
        self.down = Linear(module, intermediate_size, (Projection("down_proj", hidden_size, rows),))
        silu_mul, dtype = "silu_mul", dtype_name(build.dtype)
        if self.down.scheme is not None:
            silu_mul = self.down.scheme.fused.get(silu_mul, silu_mul)
        size = self.down.in_size
        self._fused: Callable[..., torch.Tensor] | None = None
        if self.gate_up.scheme is None and silu_mul == "silu_mul":
            self._fused = build.fused(
                "linear_silu_mul", in_size=hidden_size, out_size=size, dtype=dtype
            )
        if self._fused is None:
            self._silu_mul = build.op(silu_mul, size=size, dtype=dtype)
        self._add: Callable[..., None] | None = None
        if self.down.scheme is None and not is_gated:
            self._add = build.fused("linear_add", in_size=size, out_size=hidden_size, dtype=dtype)
        self.output_gate = (
            Linear(
                UnquantizedBuild(build),
                hidden_size,
                (Projection("shared_expert_gate", 1, None),),
            )
            if is_gated
            else None
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output [T, hidden] for x [T, hidden]."""
        result = self.down(self._gate(x))
        if self.output_gate is not None:
            result.mul_(self.output_gate(x).sigmoid_())
        return result

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """Add the output for x [T, hidden] to `total` [T, hidden]."""
        if self._add is None:
            total += self(x)
        else:
            self._add(self._gate(x), self.down.weight, total)

    def _gate(self, x: torch.Tensor) -> Activation:
        """Return the activation of the gate and up projections of x."""
        if self._fused is not None:
            return self._fused(x, self.gate_up.weight)
        gated: Activation = self._silu_mul(self.gate_up(x))
        return gated

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """List the weights."""
        yield from self.gate_up.slots(f"{prefix}shared_experts.")
        yield from self.down.slots(f"{prefix}shared_experts.")
        if self.output_gate is not None:
            yield from self.output_gate.slots(prefix)


class RoutedExperts(Protocol):
    """The experts of a layer: `Experts`, or those of a family. `local` says which of them this process has."""

    num_experts: int
    hidden_size: int
    local: LocalExperts

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the sum [T, hidden] of the experts `ids`, int32 [T, k], times `weights`, float32, for x [T, hidden].

        With several processes it has the terms of this one.
        """

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """List the weights."""


class MoE:
    """Routes each token to its top-k experts and returns the weighted sum of their outputs.

    The experts are gated MLPs unless others are given. The output of shared experts, if there are any, is added. On a
    GPU, shared experts run on another stream if there are few tokens.
    """

    def __init__(
        self,
        build: BuildContext,
        hidden_size: int,
        config: MoeConfig,
        experts: RoutedExperts | None = None,
    ) -> None:
        self.router = Router(
            build,
            hidden_size,
            config.routing,
            bias=config.has_router_bias,
            is_wide=config.is_router_wide,
        )
        self.shared = (
            SharedExperts(build, hidden_size, config.shared_size, is_gated=config.is_shared_gated)
            if config.shared_size
            else None
        )
        self._side = None if self.shared is None else build.side_stream()
        self.experts: RoutedExperts = experts or Experts(
            build,
            num_experts=config.routing.num_experts,
            top_k=config.routing.top_k,
            hidden_size=hidden_size,
            intermediate_size=config.intermediate_size,
        )
        self._top_k, self._routes_tokens = config.routing.top_k, build.routes_tokens
        self._num_processes = build.group("experts").size
        # Each process sends a part of its engine's tokens. Those that share the features of experts send the same part.
        engine, moe = build.group("engine"), build.group("moe")
        self._part, self._num_parts = engine.rank // moe.size, max(1, engine.size // moe.size)
        # Takes the arguments of `Experts`. If tokens are routed, the result has the terms of all engines.
        self.run_experts: Callable[..., torch.Tensor] = self.experts

    def __call__(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [T, hidden] for the normalized x + residual [T, hidden], and that sum.

        The sum overwrites the residual.
        """
        x, residual = norm.add(x, residual)
        if self.shared is None:
            return self.run_experts(x, *self.router(x)), residual
        num_tokens, side = x.shape[0], self._side
        if num_tokens > MAX_PARALLEL_TOKENS:
            result = self.run_experts(x, *self.router(x))
            self.shared.add_to(result, x)
        elif side is None or num_tokens < MIN_PARALLEL_TOKENS:
            result = self.run_experts(x, *self.router(x))
            result += self.shared(x)
        else:
            # The router starts first: the routed experts wait for it, and the shared ones would delay it.
            is_ready = torch.cuda.current_stream().record_event()
            routed = self.router(x)
            side.wait_event(is_ready)
            with torch.cuda.stream(side):
                shared = self.shared(x)
            result = self.run_experts(x, *routed)
            torch.cuda.current_stream().wait_stream(side)
            result += shared
        return result, residual

    @property
    def fused_op(self) -> str:
        """The op that adds up and normalizes summands. The router reads them unquantized."""
        return FUSED_OP

    def fuse_sum(self, build: BuildContext, fused: FusedCollective) -> None:
        """Take summands as x (see `TakesSummands`). Here only the norm reads them."""

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """List the router, shared experts and experts."""
        yield from self.router.slots(prefix)
        if self.shared is not None:
            yield from self.shared.slots(prefix)
        yield from self.experts.slots(prefix)

    def sharding(self, prefix: str) -> Iterator[ShardingSpec]:
        """Routing is replicated. The experts' output is a partial sum: within the engine if tokens are routed."""
        if not self._routes_tokens:
            yield from expert_sharding(prefix, self.experts.num_experts, self.experts.hidden_size)
            return

        def bind(exchange: Callable[..., torch.Tensor]) -> None:
            experts, local = self.experts, self.experts.local
            owners = local.owners()

            def run(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
                return exchange(x, weights, local.places(ids), owners, experts)

            self.run_experts = run if self._num_parts == 1 else self._for_own_part(run)

        size, whole = self.experts.hidden_size, Replicated()
        share = routed_share(self.experts.num_experts, self._num_processes, self._top_k)
        yield ShardingSpec(f"{prefix}gate", whole, whole, size, bind)
        yield ShardingSpec(
            f"{prefix}experts",
            whole,
            Partial(("engine",)),
            size,
            routed_share=share / self._num_parts,
        )

    def _for_own_part(self, run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return a function that runs for this process's part of the tokens. The rows of others are zero."""

        def run_part(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            num_rows = -(-x.shape[0] // self._num_parts)  # the last parts may have fewer
            rows = slice(self._part * num_rows, (self._part + 1) * num_rows)
            result = torch.zeros_like(x)
            result[rows] = run(x[rows], weights[rows], ids[rows])
            return result

        return run_part


def routed_share(num_experts: int, num_processes: int, top_k: int) -> float:
    """Return the share of processes that own one of a token's experts, if all experts are equally likely."""
    num_others = num_experts - num_experts // num_processes
    return 1 - comb(num_others, top_k) / comb(num_experts, top_k)


def expert_sharding(prefix: str, num_experts: int, hidden_size: int) -> Iterator[ShardingSpec]:
    """List the sharding specs of a router and experts, whole or in part on each process."""
    yield ShardingSpec(
        f"{prefix}gate", Replicated(), Replicated(), num_experts, takes_all_tokens=True
    )
    partial_sum = Partial(("moe", "experts"))
    yield ShardingSpec(
        f"{prefix}experts", Replicated(), partial_sum, hidden_size, takes_all_tokens=True
    )
