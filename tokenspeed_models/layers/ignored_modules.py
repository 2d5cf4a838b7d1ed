"""Modules that a quantized checkpoint keeps unquantized: the attention or the MLP of some or all layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from tokenspeed_core.api import AttentionCall, BuildContext, LatentAttentionCall, Quantization
from tokenspeed_models.quantization_config import ignored_modules

_PROJECTIONS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


class UnquantizedBuild:
    """A `BuildContext` like another one, but without quantization, and in another dtype if one is given."""

    def __init__(self, build: BuildContext, dtype: torch.dtype | None = None) -> None:
        self._build = build
        self.dtype, self.device = dtype or build.dtype, build.device
        self.max_model_len = build.max_model_len
        self.quantization: Quantization | None = None

    def each_layer(self, num_layers: int) -> Iterator[int]:
        """Yield the layer indices."""
        return self._build.each_layer(num_layers)

    def op(self, op: str, **problem: Any) -> Callable[..., Any]:
        """Return the selected kernel of an op."""
        return self._build.op(op, **problem)

    def fused(self, op: str, **problem: Any) -> Callable[..., Any] | None:
        """Return the selected kernel of a fused op, or None."""
        return self._build.fused(op, **problem)

    def attention(self, **layer: Any) -> AttentionCall:
        """Register a layer's attention."""
        return self._build.attention(**layer)

    def latent_attention(self, **layer: Any) -> LatentAttentionCall:
        """Register a layer's latent attention."""
        return self._build.latent_attention(**layer)


def build_for_module(
    build: BuildContext, config: Mapping[str, Any], layer: int, module: str, *, num_experts: int = 0
) -> BuildContext:
    """Return the context to build a layer's "self_attn" or "mlp" with: without quantization if it is ignored.

    Raises ValueError if the checkpoint's `config` quantizes only some of the module's linear layers.
    """
    if build.quantization is None:
        return build
    experts = [f"experts.{expert}." for expert in range(num_experts)] or [""]
    names = [
        f"model.layers.{layer}.{module}.{expert}{name}"
        for expert in experts
        for name in _PROJECTIONS[module]
    ]
    ignored = ignored_modules(config, names)
    if not ignored:
        return build
    if len(ignored) == len(names):
        return UnquantizedBuild(build)
    quantized = next(name for name in names if name not in ignored)
    raise ValueError(
        f"config.json: quantization_config ignores {ignored[0]} but quantizes {quantized}. All linear layers of a "
        f"layer's {module} must be quantized, or none. Quantize the model again with one choice for the whole {module}."
    )
