"""RMS normalisation, alone or fused with the residual addition before it and the linear layer after it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers.linear import Activation, Linear
from tokenspeed_models.layers.ops import dtype_name, quantized_op
from tokenspeed_models.sharding import Replicated, ShardingSpec
from tokenspeed_models.weights import WeightSlot


class RMSNorm:
    """Divides the last axis by its root mean square and multiplies it by a weight (arXiv:1910.07467)."""

    def __init__(self, build: BuildContext, size: int, eps: float) -> None:
        self.weight = torch.empty(size, dtype=build.dtype, device=build.device)
        self.eps = eps
        dtype = dtype_name(build.dtype)
        self._norm = build.op("rms_norm", size=size, dtype=dtype)
        self._add_norm = build.op("add_rms_norm", size=size, dtype=dtype)
        quantized = quantized_op(build, "add_rms_norm")
        self._add_norm_quantize = (
            None if quantized == "add_rms_norm" else build.op(quantized, size=size, dtype=dtype)
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised x [..., size]."""
        result: torch.Tensor = self._norm(x, self.weight, self.eps)
        return result

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x [T, size] to the residual in place; return the normalised sum and the residual."""
        result: tuple[torch.Tensor, torch.Tensor] = self._add_norm(
            x, residual, self.weight, self.eps
        )
        return result

    def add_quantize(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[Activation, torch.Tensor]:
        """Like `add`, but quantize the normalised sum too if the quantization method has an op for that."""
        if self._add_norm_quantize is None:
            return self.add(x, residual)
        y, scale, residual = self._add_norm_quantize(x, residual, self.weight, self.eps)
        return (y, scale), residual

    def slots(self, name: str) -> Iterator[WeightSlot]:
        """List the weight."""
        yield WeightSlot(f"{name}.weight", self.weight, None, "norm")

    def sharding(self, name: str, group: str) -> Iterator[ShardingSpec]:
        """Input and output are replicated, since a row is normalised as a whole."""
        yield ShardingSpec(name, group, Replicated(), Replicated())


class NormedLinear:
    """Residual addition, RMS norm and a linear layer; with `is_gated` also silu(first half) * second half.

    One op computes everything. With quantization this needs a fused op of the method; without one, the norm and the
    linear layer run one after the other and the caller applies the gate.
    """

    def __init__(self, build: BuildContext, linear: Linear, *, is_gated: bool = False) -> None:
        out_size, self._linear = linear.out_size, linear
        op = quantized_op(
            build, "add_rms_norm_linear_silu_mul" if is_gated else "add_rms_norm_linear"
        )
        is_fused = build.quantization is None or op in build.quantization.fused.values()
        self._fused = (
            build.op(
                op,
                in_size=linear.in_size,
                out_size=out_size // 2 if is_gated else out_size,
                dtype=dtype_name(build.dtype),
            )
            if is_fused
            else None
        )

    def __call__(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [T, out] for the normalised x + residual [T, in], and that sum.

        The sum may overwrite the residual.
        """
        if self._fused is None:
            normed, residual = norm.add_quantize(x, residual)
            return self._linear(normed), residual
        result: tuple[torch.Tensor, torch.Tensor] = self._fused(
            x, residual, norm.weight, norm.eps, *self._linear.operands
        )
        return result
