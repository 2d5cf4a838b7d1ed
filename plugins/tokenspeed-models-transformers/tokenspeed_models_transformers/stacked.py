"""Computes linear layers that share an input in one GEMM: plain layers of transformers, or TokenSpeed's quantized layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers import Linear, Projection, dtype_name, shared_scheme
from tokenspeed_models.weights import Shard, StackedShard, WeightSlot
from tokenspeed_models_transformers.weights import merge

QUANTIZED = "tokenspeed_quantized"
"""The attribute of a quantized linear layer with the forward that replaces that of transformers."""

ALL_REDUCE = "tokenspeed_all_reduce"
"""The attribute of a linear layer that returns partial sums: the kernel that adds them up."""

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


@dataclass(frozen=True, slots=True)
class Summed:
    """Computes something, and adds up the results of all processes."""

    compute: Callable[..., Tensor]
    all_reduce: Callable[[Tensor], Tensor]

    def __call__(self, *arguments: Any) -> Tensor:
        """Return the sum of the tensors [..., out] of all processes."""
        part = self.compute(*arguments)
        return self.all_reduce(part.reshape(-1, part.shape[-1])).view(part.shape)


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer of a model, its path there, and how its weight is sharded."""

    path: str
    module: nn.Linear
    shard: Shard | StackedShard | None = None


def plain_gemm(build: BuildContext, in_size: int, out_size: int) -> Callable[..., Tensor]:
    """Return the kernel of an unquantized linear layer."""
    kernel: Callable[..., Tensor] = build.op(
        "linear", in_size=in_size, out_size=out_size, dtype=dtype_name(build.dtype)
    )
    return kernel


def stack(build: BuildContext, layers: Sequence[Layer]) -> tuple[Stacked, tuple[WeightSlot, ...]]:
    """Return one GEMM for linear layers with the same input, and the slots of quantized layers.

    The layers keep this process's part of their features. A quantized layer loses its parameters and gets the attribute
    `QUANTIZED`. All of the layers have a bias, or none has. Raises ValueError if they have different schemes, or if
    features cannot be divided.
    """
    modules = [each.module for each in layers]
    if shared_scheme(build, (each.path for each in layers)) is None:
        for layer in layers:
            _divide(build, layer)
        weight, bias = merge(modules, build.device)
        return Gemm(plain_gemm(build, weight.shape[1], weight.shape[0]), weight, bias), ()
    projections = tuple(Projection(e.path, e.module.out_features, e.shard) for e in layers)
    has_bias = modules[0].bias is not None
    linear = Linear(build, modules[0].in_features, projections, bias=has_bias)
    start = 0
    for module, size in zip(modules, linear.sizes, strict=True):
        module.register_parameter("weight", None)
        module.register_parameter("bias", None)
        vars(module)[QUANTIZED] = QuantizedPart(linear, slice(start, start + size))
        start += size
    return linear, tuple(linear.slots(""))


def _divide(build: BuildContext, layer: Layer) -> None:
    """Replace the parameters on the meta device by those of this process's features. Raises ValueError."""
    module, shard = layer.module, layer.shard
    if shard is None:
        return
    sizes = [module.out_features, module.in_features]
    sizes[shard.axis] = shard.local_size(layer.path, sizes[shard.axis], build.group)
    module.out_features, module.in_features = sizes
    module.weight = _empty(module.weight, *sizes)
    if module.bias is not None:
        module.bias = _empty(module.bias, sizes[0])


def _empty(parameter: Tensor, *shape: int) -> nn.Parameter:
    memory = torch.empty(shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(memory, requires_grad=False)
