"""RMS normalization, alone or fused with the residual addition before it and the linear layer after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from tokenspeed_core.api import FUSED_OP, BuildContext, FusedCollective
from tokenspeed_models.layers.linear import Linear
from tokenspeed_models.layers.ops import dtype_name
from tokenspeed_models.layers.summed import sum_before
from tokenspeed_models.sharding import Replicated, ShardingSpec
from tokenspeed_models.weights import WeightSlot


class RMSNorm:
    """Divides the last axis by its root mean square and multiplies it by a weight (arXiv:1910.07467).

    Families that multiply by `weight_offset` plus the checkpoint's weight get the sum as their weight.
    """

    def __init__(
        self, build: BuildContext, size: int, eps: float, *, weight_offset: float = 0.0
    ) -> None:
        self.weight = make_norm_weight(build, size, weight_offset)
        self.eps = eps
        self._weight_offset = weight_offset
        dtype = dtype_name(build.dtype)
        self._norm = build.op("rms_norm", size=size, dtype=dtype)
        self._add_norm = build.op("add_rms_norm", size=size, dtype=dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalized x [..., size]."""
        result: torch.Tensor = self._norm(x, self.weight, self.eps)
        return result

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x [T, size] to the residual in place; return the normalized sum and the residual."""
        result: tuple[torch.Tensor, torch.Tensor] = self._add_norm(
            x, residual, self.weight, self.eps
        )
        return result

    def fuse_sum(self, build: BuildContext, fused: FusedCollective) -> None:
        """Let `add` take summands, and add up those of all processes."""
        self._add_norm = sum_before(fused, self._add_norm)

    def slots(self, name: str) -> Iterator[WeightSlot]:
        """List the weight."""
        yield norm_slot(f"{name}.weight", self.weight, self._weight_offset)

    def sharding(self, name: str) -> Iterator[ShardingSpec]:
        """Input and output are replicated, since a row is normalized as a whole."""
        yield ShardingSpec(name, Replicated(), Replicated(), self.weight.shape[0])


def make_norm_weight(build: BuildContext, size: int, weight_offset: float) -> torch.Tensor:
    """Return an uninitialized norm weight [size].

    With an offset it is float32: the sum of a number near 0 and 1 would lose the number's low bits in 16 bits, and
    such families compute it in float32.
    """
    dtype = torch.float32 if weight_offset else build.dtype
    return torch.empty(size, dtype=dtype, device=build.device)


def norm_slot(name: str, weight: torch.Tensor, weight_offset: float) -> WeightSlot:
    """Return the slot of a norm weight, to which the offset is added while it is loaded."""
    store = partial(_store_sum, weight, weight_offset) if weight_offset else None
    return WeightSlot(name, weight, None, "norm", on_load=store)


def _store_sum(weight: torch.Tensor, offset: float, tensor: torch.Tensor) -> None:
    weight.copy_(tensor.to(torch.float32) + offset)


class NormedLinear:
    """Residual addition, RMS norm and a linear layer; with an `activation` also the gate of its two halves.

    One op computes everything if the linear layer is unquantized or its scheme has a fused op. Otherwise the norm (which
    may quantize its result) and the linear layer run one after the other. With `has_norm=False`, the layer only adds
    and multiplies.
    """

    def __init__(
        self,
        build: BuildContext,
        linear: Linear,
        *,
        activation: str | None = None,
        has_norm: bool = True,
    ) -> None:
        out_size, self._linear = linear.out_size, linear
        op = (
            "add_rms_norm_linear" if activation is None else f"add_rms_norm_linear_{activation}_mul"
        )
        scheme, dtype = linear.scheme, dtype_name(build.dtype)
        fused = op if scheme is None else scheme.fused.get(op)
        quantizing = None if scheme is None else scheme.fused.get("add_rms_norm")
        self._fused: Callable[..., Any] | None = None
        self._quantizing_norm: Callable[..., Any] | None = None
        if has_norm and fused is not None:
            self._fused = build.op(
                fused,
                in_size=linear.in_size,
                out_size=out_size if activation is None else out_size // 2,
                dtype=dtype,
            )
        elif has_norm and quantizing is not None:
            self._quantizing_norm = build.op(quantizing, size=linear.in_size, dtype=dtype)

    def __call__(
        self, norm: RMSNorm | None, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [T, out] for the normalized x + residual [T, in], and that sum.

        The sum may overwrite the residual.
        """
        if norm is None:
            residual.add_(x)
            return self._linear(residual), residual
        if self._fused is not None:
            result: tuple[torch.Tensor, torch.Tensor] = self._fused(
                x, residual, norm.weight, norm.eps, *self._linear.operands
            )
            return result
        if self._quantizing_norm is not None:
            y, scale, residual = self._quantizing_norm(x, residual, norm.weight, norm.eps)
            return self._linear((y, scale)), residual
        normed, residual = norm.add(x, residual)
        return self._linear(normed), residual

    @property
    def fused_op(self) -> str:
        """The op that adds up and normalizes summands for this layer (see `TakesSummands`)."""
        scheme = self._linear.scheme
        if scheme is None or (self._fused is None and self._quantizing_norm is None):
            return FUSED_OP
        return scheme.fused.get(FUSED_OP, FUSED_OP)

    def fuse_sum(
        self,
        fused: FusedCollective,
        gate_of_normed: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """Take summands, and add up those of all processes.

        `gate_of_normed` computes this layer and the gate of its two halves; None: there is no gate.

        Without a fused op for the norm, the norm itself adds them up.
        """
        linear, quantizing = self._linear, self._quantizing_norm

        def quantize(
            x: torch.Tensor,
            residual: torch.Tensor,
            weight: torch.Tensor,
            eps: float,
            *operands: torch.Tensor | None,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            assert quantizing is not None
            y, scale, residual = quantizing(x, residual, weight, eps)
            return linear((y, scale)), residual

        separate = quantize if quantizing is not None else self._fused
        if separate is not None:
            self._fused = sum_before(fused, separate, gate_of_normed or linear)
