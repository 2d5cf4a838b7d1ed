"""The quantization scheme of each linear layer, by its name in the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from tokenspeed_core.api import (
    AttentionCall,
    BuildContext,
    Collective,
    FusedCollective,
    LatentAttentionCall,
    ProcessGroup,
    QuantizationScheme,
)
from tokenspeed_models.weights import published_name


class ModuleBuild:
    """A `BuildContext` for one module: names of linear layers are relative to its `name`.

    `renames` maps parts of names to those that the family's published checkpoints have instead, as in `WeightMap`.
    """

    def __init__(
        self, build: BuildContext, name: str, renames: Mapping[str, str] | None = None
    ) -> None:
        self._build, self._name, self._renames = build, name, renames or {}
        self.dtype, self.device = build.dtype, build.device
        self.max_model_len = build.max_model_len
        self.expert_balance, self.routes_tokens = build.expert_balance, build.routes_tokens
        self.token_counts = build.token_counts

    def group(self, name: str) -> ProcessGroup:
        """Return one of the process groups that share the model."""
        return self._build.group(name)

    def scheme(self, layer: str) -> QuantizationScheme | None:
        """Return how a linear layer of the module is quantized, None if it is not."""
        return self._build.scheme(self._published(layer))

    def full_name(self, layer: str) -> str:
        """Return the name of a linear layer of the module in the checkpoint, for errors."""
        return full_name(self._build, self._published(layer))

    def _published(self, layer: str) -> str:
        return published_name(f"{self._name}.{layer}.", self._renames).removesuffix(".")

    def each_layer(self, num_layers: int) -> Iterator[int]:
        """Yield the layer indices."""
        return self._build.each_layer(num_layers)

    def op(self, op: str, **problem: Any) -> Callable[..., Any]:
        """Return the selected kernel of an op."""
        return self._build.op(op, **problem)

    def fused(self, op: str, **problem: Any) -> Callable[..., Any] | None:
        """Return the selected kernel of a fused op, or None."""
        return self._build.fused(op, **problem)

    def comm(self, collective: Collective) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the kernel of a collective."""
        return self._build.comm(collective)

    def fused_comm(self, all_reduce: Collective) -> FusedCollective | None:
        """Return the kernels of an all-reduce that may be fused, or None."""
        return self._build.fused_comm(all_reduce)

    def side_stream(self) -> torch.cuda.Stream | None:
        """Return a stream for work in parallel to the current one; None without CUDA."""
        return self._build.side_stream()

    def attention(self, **layer: Any) -> AttentionCall:
        """Register a layer's attention."""
        return self._build.attention(**layer)

    def latent_attention(self, **layer: Any) -> LatentAttentionCall:
        """Register a layer's latent attention."""
        return self._build.latent_attention(**layer)


class UnquantizedBuild(ModuleBuild):
    """A `BuildContext` for layers that are never quantized, such as routers, in another dtype if one is given."""

    def __init__(self, build: BuildContext, dtype: torch.dtype | None = None) -> None:
        super().__init__(build, "")
        self.dtype = dtype or build.dtype

    def scheme(self, layer: str) -> None:
        """Return None."""

    def full_name(self, layer: str) -> str:
        """Return the name of a linear layer in the checkpoint."""
        return full_name(self._build, layer)


def full_name(build: BuildContext, layer: str) -> str:
    """Return the name of a linear layer in the checkpoint; `layer` is relative to the module that `build` is for."""
    return build.full_name(layer) if isinstance(build, ModuleBuild) else layer


def shared_scheme(build: BuildContext, layers: Iterable[str]) -> QuantizationScheme | None:
    """Return the scheme of linear layers with stacked weights, None if they are not quantized.

    Raises ValueError if they have different ones.
    """
    (first, scheme), *others = ((layer, build.scheme(layer)) for layer in layers)
    for layer, other in others:
        if other != scheme:
            names = ["none" if each is None else each.name for each in (scheme, other)]
            raise ValueError(
                f"config.json: quantization_config has {names[0]} for {first} and {names[1]} for {layer}. Their weights "
                "are stacked, so that they must have the same scheme. Quantize the model again with one for both."
            )
    return scheme
