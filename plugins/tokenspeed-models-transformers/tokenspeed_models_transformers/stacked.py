"""Computes linear layers that share an input in one GEMM: plain layers of transformers, or TokenSpeed's quantized layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers import Linear, Projection, dtype_name, shared_scheme
from tokenspeed_models.weights import WeightSlot
from tokenspeed_models_transformers.weights import merge

QUANTIZED = "tokenspeed_quantized"
"""The attribute of a quantized linear layer with the forward that replaces that of transformers."""

Stacked = Callable[[Any], Tensor]
"""Maps x [T, in], or the result of a quantizing op for x, to [T, sum of outputs]."""


@dataclass(frozen=True, slots=True)
class Gemm:
    """A kernel of the op `linear` and its operands."""

    kernel: Callable[..., Tensor]
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, in] to [T, out]."""
        return self.kernel(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class QuantizedPart:
    """The forward of a linear layer that is a part of a quantized one: the columns of its outputs."""

    whole: Linear
    columns: slice

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [..., in] to [..., out]."""
        y = self.whole(x.reshape(-1, x.shape[-1]))[:, self.columns]
        return y.reshape(*x.shape[:-1], y.shape[-1])


def plain_gemm(build: BuildContext, in_size: int, out_size: int) -> Callable[..., Tensor]:
    """Return the kernel of an unquantized linear layer."""
    kernel: Callable[..., Tensor] = build.op(
        "linear", in_size=in_size, out_size=out_size, dtype=dtype_name(build.dtype)
    )
    return kernel


def stack(
    build: BuildContext, layers: Sequence[tuple[str, nn.Linear]]
) -> tuple[Stacked, tuple[WeightSlot, ...]]:
    """Return one GEMM for linear layers with the same input, given with their paths, and the slots of quantized layers.

    A quantized layer loses its parameters and gets the attribute `QUANTIZED`. All of the layers have a bias, or none
    has. Raises ValueError if they have different schemes.
    """
    modules = [module for _, module in layers]
    if shared_scheme(build, (path for path, _ in layers)) is None:
        weight, bias = merge(modules, build.device)
        return Gemm(plain_gemm(build, weight.shape[1], weight.shape[0]), weight, bias), ()
    projections = tuple(Projection(path, module.out_features, None) for path, module in layers)
    has_bias = modules[0].bias is not None
    linear = Linear(build, modules[0].in_features, projections, bias=has_bias)
    start = 0
    for module in modules:
        module.register_parameter("weight", None)
        module.register_parameter("bias", None)
        end = start + module.out_features
        vars(module)[QUANTIZED] = QuantizedPart(linear, slice(start, end))
        start = end
    return linear, tuple(linear.slots(""))
