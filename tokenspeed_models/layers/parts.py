"""Parts of a quantised checkpoint that it keeps whole: attention, or the MLP or experts, of some or all layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tokenspeed_core.api import AttentionCall, BuildContext, Quantization
from tokenspeed_models.quantization_config import kept_whole

_PROJECTIONS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


class WholeBuild:
    """A build that gives what another gives, and quantises nothing."""

    def __init__(self, build: BuildContext) -> None:
        self._build = build
        self.dtype, self.device = build.dtype, build.device
        self.quantization: Quantization | None = None

    def each_layer(self, num_layers: int) -> Iterator[int]:
        """Yield the layers from 0."""
        return self._build.each_layer(num_layers)

    def op(self, op: str, **problem: Any) -> Callable[..., Any]:
        """Return the selected kernel of an op."""
        return self._build.op(op, **problem)

    def fused(self, op: str, **problem: Any) -> Callable[..., Any] | None:
        """Return the selected kernel of a fused op."""
        return self._build.fused(op, **problem)

    def attention(self, **layer: Any) -> AttentionCall:
        """Register a layer's attention."""
        return self._build.attention(**layer)


def build_of_part(
    build: BuildContext, config: Mapping[str, Any], layer: int, part: str, *, num_experts: int = 0
) -> BuildContext:
    """Return what to build "self_attn" or "mlp" of a layer with: `build`, or one that keeps all of the part whole.

    Raises ValueError where a checkpoint, by its `config`, quantises some of a part's linear maps and keeps others.
    """
    if build.quantization is None:
        return build
    experts = [f"experts.{expert}." for expert in range(num_experts)] or [""]
    names = [
        f"model.layers.{layer}.{part}.{expert}{name}"
        for expert in experts
        for name in _PROJECTIONS[part]
    ]
    whole = kept_whole(config, names)
    if not whole:
        return build
    if len(whole) == len(names):
        return WholeBuild(build)
    rest = next(name for name in names if name not in whole)
    raise ValueError(
        f"config.json: quantization_config keeps {whole[0]} whole and quantises {rest}; served are checkpoints that "
        f"quantise all linear maps of a layer's {part} or none; quantise the model again so"
    )
