"""Comparison of modules with formulas, on copies with small random weights on the CPU."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


def same(found: object, expected: Tensor) -> bool:
    """Return whether a module computed what a formula did, up to rounding."""
    return (
        isinstance(found, Tensor)
        and found.shape == expected.shape
        and torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
    )


def copied(module: nn.Module, **changes: nn.Module | nn.Parameter) -> nn.Module:
    """Return a copy of a module in which some of its modules or parameters are others."""
    result = copy.copy(module)
    result._modules = dict(module._modules)
    result._parameters = dict(module._parameters)
    for name, value in changes.items():
        setattr(result, name, value)
    return result


def random_tensor(*shape: int, seed: int) -> Tensor:
    """Return normal values on the CPU, the same in every run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_linear(in_size: int, out_size: int, seed: int, *, bias: bool) -> nn.Linear:
    """Return a linear layer with random weights on the CPU."""
    layer = nn.Linear(in_size, out_size, bias=bias, device="meta")
    layer.weight = nn.Parameter(random_tensor(out_size, in_size, seed=seed), requires_grad=False)
    if bias:
        layer.bias = nn.Parameter(random_tensor(out_size, seed=seed + 1), requires_grad=False)
    return layer
