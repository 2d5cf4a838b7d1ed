"""Comparison of modules with formulas, on copies with small random weights on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

# Sizes of random inputs. Large ones show whether a module limits its values.
MAGNITUDES = (1.0, 1000.0)
_NUM_ROWS = 3


def same(found: object, expected: Tensor) -> bool:
    """Return whether a module's result equals that of a formula, up to rounding."""
    return (
        isinstance(found, Tensor)
        and found.shape == expected.shape
        and torch.allclose(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    )


def copied(module: nn.Module, **changes: Any) -> nn.Module:
    """Return a copy of a module with some of its modules, parameters, buffers or attributes replaced."""
    result = copy.copy(module)
    result._modules = dict(module._modules)
    result._parameters = dict(module._parameters)
    result._buffers = dict(module._buffers)
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


def rms_norm_eps(module: Any) -> float | None:
    """Return the epsilon of a module that computes `rms_norm`, or None if it computes something else."""
    weight, eps = getattr(module, "weight", None), None
    for name in ("variance_epsilon", "eps"):
        eps = getattr(module, name, eps)
    is_norm = "RMSNorm" in type(module).__name__ and list(module._parameters) == ["weight"]
    if not is_norm or weight is None or weight.dim() != 1 or not isinstance(eps, float):
        return None
    size = len(weight)
    small = copied(module, weight=nn.Parameter(random_tensor(size, seed=0), requires_grad=False))
    x = random_tensor(_NUM_ROWS, size, seed=1) * eps**0.5  # so small that the epsilon counts
    try:
        found = small.forward(x)
    except (RuntimeError, TypeError):
        return None
    expected = torch.rms_norm(x, (size,), small._parameters["weight"], eps)
    return eps if same(found, expected) else None
