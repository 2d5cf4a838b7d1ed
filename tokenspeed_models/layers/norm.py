"""Root-mean-square normalisation, alone or fused with the addition before it and the linear map behind it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers.linear import Activation, Linear, fused_op
from tokenspeed_models.layers.packed import dtype_name
from tokenspeed_models.placement import Boundary, Replicated
from tokenspeed_models.weights import WeightSlot


class RMSNorm:
    """Normalises the last axis by its root mean square and scales it by a weight (arXiv:1910.07467)."""

    def __init__(self, build: BuildContext, size: int, eps: float) -> None:
        self.weight = torch.empty(size, dtype=build.dtype, device=build.device)
        self.eps = eps
        dtype = dtype_name(build.dtype)
        self._norm = build.op("rms_norm", size=size, dtype=dtype)
        self._add_norm = build.op("add_rms_norm", size=size, dtype=dtype)
        fused = fused_op(build, "add_rms_norm")
        self._quantize_norm = (
            None if fused == "add_rms_norm" else build.op(fused, size=size, dtype=dtype)
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised x [..., size]."""
        result: torch.Tensor = self._norm(x, self.weight, self.eps)
        return result

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x [T, size] to the residual in place; return the sum normalised, and the residual."""
        result: tuple[torch.Tensor, torch.Tensor] = self._add_norm(
            x, residual, self.weight, self.eps
        )
        return result

    def add_before_linear(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[Activation, torch.Tensor]:
        """As `add`, for linear maps alone: what they take comes quantised where the method has a fused op for that."""
        if self._quantize_norm is None:
            return self.add(x, residual)
        y, scale, residual = self._quantize_norm(x, residual, self.weight, self.eps)
        return (y, scale), residual

    def slots(self, name: str) -> Iterator[WeightSlot]:
        """List the weight."""
        yield WeightSlot(f"{name}.weight", self.weight, None, "norm")

    def boundaries(self, name: str, group: str) -> Iterator[Boundary]:
        """Take and give whole tensors: a row is normalised in one place."""
        yield Boundary(name, group, Replicated(), Replicated())


class NormedLinear:
    """A linear map of the residual stream, normalised; if it is gated, silu of its first half times its second.

    One op does all of it, unless the map is quantised: then its method's op or parts do, and a gate is the caller's.
    """

    def __init__(self, build: BuildContext, linear: Linear, *, is_gated: bool = False) -> None:
        out_size, self._linear = linear.out_size, linear
        op = fused_op(build, "add_rms_norm_linear_silu_mul" if is_gated else "add_rms_norm_linear")
        is_whole = build.quantization is None or op in build.quantization.fused.values()
        self._fused = (
            build.op(
                op,
                in_size=linear.in_size,
                out_size=out_size // 2 if is_gated else out_size,
                dtype=dtype_name(build.dtype),
            )
            if is_whole
            else None
        )

    def __call__(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the map [T, out] of the normalised sum of x and residual [T, in], and the sum.

        The residual may be overwritten by the sum.
        """
        if self._fused is None:
            normalized, residual = norm.add_before_linear(x, residual)
            return self._linear(normalized), residual
        result: tuple[torch.Tensor, torch.Tensor] = self._fused(
            x, residual, norm.weight, norm.eps, *self._linear.operands
        )
        return result
