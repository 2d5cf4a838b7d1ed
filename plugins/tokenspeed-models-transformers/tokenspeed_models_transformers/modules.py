"""Replaces the computation of modules by TokenSpeed's kernels, where both compute the same.

A module keeps its class, its name and its parameters; only its `forward` is replaced. Linear layers are known by their
class. For all others, a copy of the module with small random weights runs on the CPU, and is compared with a formula.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from tokenspeed_core.api import AttentionCall, BuildContext
from tokenspeed_models_transformers.compare import (
    MAGNITUDES,
    copied,
    random_linear,
    random_tensor,
    rms_norm_eps,
    same,
)
from tokenspeed_models_transformers.experts import MoEKernel, fits_kernel, library_experts
from tokenspeed_models_transformers.projections import (
    FusedAttention,
    RotaryLayout,
    RotaryTables,
    UsualAttention,
)
from tokenspeed_models_transformers.weights import merge

_SMALL = 8  # features of the random inputs of comparisons
_NUM_ROWS = 3


@dataclass(frozen=True, slots=True)
class _Norm:
    norm: Callable[..., Tensor]
    module: Any
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype == self.module.weight.dtype:
            return self.norm(x, self.module.weight, self.eps)
        wider: Tensor = type(self.module).forward(self.module, x)
        return wider


@dataclass(frozen=True, slots=True)
class _Linear:
    linear: Callable[..., Tensor]
    module: nn.Linear

    def __call__(self, x: Tensor) -> Tensor:
        module = self.module
        rows = self.linear(x.reshape(-1, module.in_features), module.weight, module.bias)
        return rows.view(*x.shape[:-1], module.out_features)


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """Gate and up projections in one GEMM, `silu_mul`, and the down projection."""

    gate_up: Callable[..., Tensor]
    silu_mul: Callable[..., Tensor]
    down: Callable[..., Tensor]
    weight: Tensor
    bias: Tensor | None
    last: nn.Linear

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [..., hidden] to a tensor of the same shape."""
        hidden = self.silu_mul(self.gate_up(x.reshape(-1, x.shape[-1]), self.weight, self.bias))
        return self.down(hidden, self.last.weight, self.last.bias).view(x.shape)


def find_gated_mlp(module: nn.Module) -> tuple[list[nn.Linear], nn.Linear] | None:
    """Return the layers that form gate and up, in this order, and the down projection of a gated MLP with SiLU."""
    layers = {name: each for name, each in module.named_children() if type(each) is nn.Linear}
    names = set(layers)
    if names == {"gate_proj", "up_proj", "down_proj"}:
        first = ["gate_proj", "up_proj"]
    elif names == {"gate_up_proj", "down_proj"}:
        first = ["gate_up_proj"]
    else:
        return None
    if any(True for _ in module._parameters) or len({layers[n].bias is None for n in first}) > 1:
        return None
    inner, out_size = 6, 6 * 2 // len(first)
    small: dict[str, nn.Linear] = {
        name: random_linear(_SMALL, out_size, seed, bias=layers[name].bias is not None)
        for seed, name in enumerate(first)
    }
    down = random_linear(inner, _SMALL, 5, bias=layers["down_proj"].bias is not None)
    for magnitude in MAGNITUDES:
        x = random_tensor(1, _NUM_ROWS, _SMALL, seed=7) * magnitude
        gate, up = torch.cat([small[name](x) for name in first], dim=-1).chunk(2, dim=-1)
        try:
            found = copied(module, **small, down_proj=down).forward(x)
        except (RuntimeError, TypeError, AttributeError, ValueError):
            return None
        if not same(found, down(functional.silu(gate) * up)):
            return None
    return [layers[name] for name in first], layers["down_proj"]


class Replacer:
    """Replaces modules of a model and counts what it replaced and what it left."""

    def __init__(self, build: BuildContext) -> None:
        self._build = build
        self._dtype = str(build.dtype).removeprefix("torch.")
        self._tables: dict[RotaryLayout, RotaryTables] = {}
        self.replaced: Counter[str] = Counter()
        self.left: Counter[str] = Counter()
        self.attention: list[FusedAttention] = []

    def replace(
        self,
        model: PreTrainedModel,
        attention: Mapping[str, tuple[UsualAttention, AttentionCall]],
        experts: Mapping[str, int],
    ) -> None:
        """Replace all modules that match.

        `attention` has the usual attention modules, `experts` the experts per token of each experts module.
        """
        with torch.no_grad():
            for name, module in self._by_layer(model):
                if name in experts:
                    self._bind_experts(module, experts[name])
                elif name in attention:
                    self._set(module, "attention modules", self._fused_attention(*attention[name]))
                else:
                    self._replace(module)

    def _by_layer(self, model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of layer 0, of layer 1, …, then all others, with their paths."""
        layers: dict[int, list[tuple[str, nn.Module]]] = {}
        for name, module in model.named_modules():
            numbers = [int(part) for part in name.split(".") if part.isdigit()]
            layers.setdefault(numbers[0] if numbers else -1, []).append((name, module))
        for layer in self._build.each_layer(max(layers) + 1):
            yield from layers.get(layer, ())
        yield from layers.get(-1, ())

    def _replace(self, module: Any) -> None:
        if "forward" in vars(module):
            return  # replaced together with the module around it
        dtypes = {parameter.dtype for parameter in module.parameters()}
        fits = dtypes == {self._build.dtype}  # a router, for example, may be float32
        if fits and type(module) is nn.Linear:
            self._set(module, "linear layers", self._linear(module))
        elif fits and (eps := rms_norm_eps(module)) is not None:
            norm = self._op("rms_norm", size=len(module.weight))
            self._set(module, "RMS norms", _Norm(norm, module, eps))
        elif fits and (found := find_gated_mlp(module)) is not None:
            self._set(module, "gated MLPs", self._gated_mlp(*found))
        elif dtypes and not any(True for _ in module.children()):
            self.left[type(module).__name__] += 1

    def _bind_experts(self, module: Any, top_k: int) -> None:
        if module.down_proj.dtype == self._build.dtype and fits_kernel(module):
            module.tokenspeed_experts = MoEKernel(self._build, module, top_k)
            self.replaced["mixtures of experts"] += 1
        else:
            module.tokenspeed_experts = library_experts(self._build.dtype)
            self.left[type(module).__name__] += 1

    def _fused_attention(self, usual: UsualAttention, attend: AttentionCall) -> FusedAttention:
        module, tables = usual.module, None
        if usual.layout is not None:
            tables = self._tables.setdefault(usual.layout, RotaryTables(usual.layout))
        weight, bias = merge([module.q_proj, module.k_proj, module.v_proj], self._build.device)
        for part in module.children():
            # Counted as a part of the module. Only `FusedAttention` reads their weights.
            vars(part)["forward"] = _unused
        fused = FusedAttention(
            usual,
            attend,
            tables,
            self.linear(weight.shape[1], weight.shape[0]),
            self.linear(module.o_proj.in_features, module.o_proj.out_features),
            weight,
            bias,
        )
        self.attention.append(fused)
        return fused

    def _set(self, module: Any, kind: str, forward: Callable[..., Any]) -> None:
        module.forward = forward
        self.replaced[kind] += 1

    def _op(self, op: str, **problem: int) -> Callable[..., Any]:
        return self._build.op(op, **problem, dtype=self._dtype)

    def linear(self, in_size: int, out_size: int) -> Callable[..., Tensor]:
        """Return the kernel of a linear layer."""
        return self._op("linear", in_size=in_size, out_size=out_size)

    def _linear(self, module: nn.Linear) -> _Linear:
        return _Linear(self.linear(module.in_features, module.out_features), module)

    def _gated_mlp(self, first: list[nn.Linear], last: nn.Linear) -> GatedMLP:
        weight, bias = merge(first, self._build.device)
        for layer in (*first, last):
            vars(layer)["forward"] = _unused
        return GatedMLP(
            gate_up=self.linear(weight.shape[1], weight.shape[0]),
            silu_mul=self._op("silu_mul", size=last.in_features),
            down=self.linear(last.in_features, last.out_features),
            weight=weight,
            bias=bias,
            last=last,
        )


def _unused(*arguments: Any, **keywords: Any) -> Any:
    raise AssertionError("the module around this one is replaced as a whole")
