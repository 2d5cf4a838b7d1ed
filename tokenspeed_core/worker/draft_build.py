"""The build context of a draft model's constructor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tokenspeed_core.api.models import LatentSizes
from tokenspeed_core.api.parallel import Collective, ProcessGroup
from tokenspeed_core.api.quantization import QuantizationScheme
from tokenspeed_core.worker.attention import AttentionLayer
from tokenspeed_core.worker.build import ModelBuild
from tokenspeed_core.worker.latent import LatentLayer


class DraftBuild:
    """The `BuildContext` of a draft model. Its layers are numbered after those of the target model.

    `groups` maps the draft model's cache groups to those of the engine. The target's quantization applies if the weights
    come from its checkpoint.
    """

    def __init__(
        self, build: ModelBuild, first_layer: int, groups: Mapping[str, str], *, is_quantized: bool
    ) -> None:
        self._build, self._first, self._groups = build, first_layer, groups
        self._is_quantized = is_quantized
        self.dtype, self.device = build.dtype, build.device
        self.max_model_len = build.max_model_len

    def group(self, name: str) -> ProcessGroup:
        """Return one of the process groups that share the model."""
        return self._build.group(name)

    def scheme(self, layer: str) -> QuantizationScheme | None:
        """Return how a linear layer is quantized, None if it is not."""
        return self._build.scheme(layer) if self._is_quantized else None

    def each_layer(self, num_layers: int) -> Iterator[int]:
        """Yield the layers from 0."""
        for layer in self._build.each_layer(num_layers, self._first):
            yield layer - self._first

    def op(self, op: str, **problem: Any) -> Callable[..., Any]:
        """Return the selected kernel of an op."""
        return self._build.op(op, **problem)

    def fused(self, op: str, **problem: Any) -> Callable[..., Any] | None:
        """Return the selected kernel of a fused op, or None."""
        return self._build.fused(op, **problem)

    def comm(self, collective: Collective) -> Callable[..., Any]:
        """Return the kernel of a collective."""
        return self._build.comm(collective)

    def attention(self, *, layer: int, group: str = "full", **problem: Any) -> AttentionLayer:
        """Register a layer's attention."""
        group = self._groups.get(group, group)
        return self._build.attention(layer=self._first + layer, group=group, **problem)

    def latent_attention(
        self, *, layer: int, sizes: LatentSizes, scale: float, group: str = "latent"
    ) -> LatentLayer:
        """Register a layer's latent attention."""
        return self._build.latent_attention(
            layer=self._first + layer,
            sizes=sizes,
            scale=scale,
            group=self._groups.get(group, group),
        )
