"""Decoder layers in which the first residual addition and the second RMS norm run as one kernel.

The usual layer adds attention of the first norm to its input, then the MLP of the second norm. The layer's own modules
compute everything but the additions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tokenspeed_models_transformers.compare import (
    MAGNITUDES,
    copied,
    random_tensor,
    rms_norm_eps,
    same,
)

_SMALL = 8  # features of the random inputs of comparisons
_NUM_TOKENS = 3
_NAMES = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}


class _Part(nn.Module):
    """Replaces a part: multiplies by a random matrix and records its arguments."""

    def __init__(self, seed: int, *, is_attention: bool = False) -> None:
        super().__init__()
        self._matrix, self._is_attention = random_tensor(_SMALL, _SMALL, seed=seed), is_attention
        self.given: dict[str, Any] = {}

    def apply_to(self, x: Tensor) -> Tensor:
        return x @ self._matrix

    def forward(self, hidden_states: Tensor, **arguments: Any) -> Any:
        self.given = arguments
        result = self.apply_to(hidden_states)
        return (result, None) if self._is_attention else result


def passed_arguments(module: nn.Module) -> tuple[str, ...] | None:
    """Return the names of the arguments that a usual decoder layer passes to its attention, None for another layer."""
    if not {name for name, _ in module.named_children()} >= _NAMES or module._parameters:
        return None
    norms = (
        module.get_submodule("input_layernorm"),
        module.get_submodule("post_attention_layernorm"),
    )
    if any(rms_norm_eps(norm) is None for norm in norms):
        return None
    parts = {
        name: _Part(seed, is_attention=name == "self_attn")
        for seed, name in enumerate(sorted(_NAMES), 31)
    }
    names = inspect.signature(type(module).forward).parameters
    given = {
        "attention_mask": None,
        "position_ids": torch.arange(_NUM_TOKENS).unsqueeze(0),
        "cache" if "cache" in names else "past_key_values": None,  # renamed in transformers 5.24
        "use_cache": False,
        "position_embeddings": (torch.ones(1), torch.ones(1)),
    }
    small = copied(module, **parts)
    norm, attend, post_norm, mlp = (
        parts[name].apply_to
        for name in ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    )
    for magnitude in MAGNITUDES:
        x = random_tensor(1, _NUM_TOKENS, _SMALL, seed=30) * magnitude
        try:
            found = small.forward(x.clone(), **given)
        except (RuntimeError, TypeError, AttributeError, ValueError, KeyError):
            return None
        total = x + attend(norm(x))
        if not same(found, total + mlp(post_norm(total))):
            return None
    passed = parts["self_attn"].given
    is_unchanged = all(name in given and given[name] is each for name, each in passed.items())
    others = (each.given for name, each in parts.items() if name != "self_attn")
    return tuple(passed) if is_unchanged and not any(others) else None


@dataclass(frozen=True, slots=True)
class FusedResidual:
    """The forward of a usual decoder layer. It overwrites its input, which the layer does not use afterwards."""

    module: Any
    add_norm: Callable[..., tuple[Tensor, Tensor]]
    eps: float
    passed: tuple[str, ...]
    names: tuple[str, ...]  # of the parameters of the module's own forward

    @classmethod
    def of(
        cls, module: Any, add_norm: Callable[..., tuple[Tensor, Tensor]], passed: tuple[str, ...]
    ) -> FusedResidual:
        """Return the forward of a module that passes arguments called `passed` to its attention."""
        eps = rms_norm_eps(module.post_attention_layernorm)
        assert eps is not None, "a usual layer has RMS norms"
        names = tuple(inspect.signature(type(module).forward).parameters)[1:]
        return cls(module, add_norm, eps, passed, names)

    def __call__(self, *values: Any, **arguments: Any) -> Tensor:
        """Return hidden states [1, T, N], as transformers calls the layer."""
        module = self.module
        arguments |= dict(zip(self.names, values, strict=False))
        norm = module.post_attention_layernorm
        hidden: Tensor = arguments.pop("hidden_states")
        if hidden.dtype != norm.weight.dtype:
            wider: Tensor = type(module).forward(module, hidden, **arguments)
            return wider
        given = {name: each for name, each in arguments.items() if name in self.passed}
        attended, _ = module.self_attn(hidden_states=module.input_layernorm(hidden), **given)
        rows = hidden.shape[-1]
        normed, total = self.add_norm(
            attended.reshape(-1, rows), hidden.reshape(-1, rows), norm.weight, self.eps
        )
        result: Tensor = total.view(hidden.shape) + module.mlp(normed.view(hidden.shape))
        return result
