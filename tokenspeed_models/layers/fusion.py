"""The fusion pass: replaces decoder layers with layers that share a kernel with the next layer.

Model files do not know about it. `fuse_layers` looks at each pair of adjacent layers for the pattern

    output projection; add, RMS norm, gate and up, SiLU; down projection; add, RMS norm, query, key and value projection

The pattern covers everything between the attention of a layer and the attention of the next layer. If a kernel of the op
`fused_block` or `fused_block_in_place` fits, it runs these steps. Otherwise the layers stay as the family built them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeGuard

import torch

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers.attention import Attention
from tokenspeed_models.layers.decoder import DecoderLayer, Layer
from tokenspeed_models.layers.mlp import MLP
from tokenspeed_models.layers.moe import MoE
from tokenspeed_models.layers.norm import RMSNorm
from tokenspeed_models.layers.ops import dtype_name

# Up to this many rows, most time is spent reading weights and in gaps between kernels, which one fused kernel avoids.
# A single row is faster with the separate kernels for it.
MAX_SMALL_BATCH = 64
# From this many rows on, GEMMs are compute-bound, and those that add to the residual in place save memory traffic.
MIN_LARGE_BATCH = 512

Kernel = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class PlainLayer(Protocol):
    """A `DecoderLayer` with the shared `Attention`."""

    input_norm: RMSNorm
    attention: Attention
    post_norm: RMSNorm
    mlp: MLP | MoE

    def finish(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the MLP."""


class FusedBlock:
    """Everything between the attention of two adjacent layers, as one op."""

    def __init__(
        self,
        layer: PlainLayer,
        next_layer: PlainLayer,
        mlp: MLP,
        small_batch: Kernel | None,
        large_batch: Kernel | None,
    ) -> None:
        self._small_batch, self._large_batch = small_batch, large_batch
        self._operands = (
            layer.attention.out.weight,
            layer.post_norm.weight,
            mlp.gate_up.weight,
            mlp.down.weight,
            next_layer.input_norm.weight,
            next_layer.attention.qkv.weight,
            layer.post_norm.eps,
        )

    def kernel(self, num_rows: int) -> Kernel | None:
        """Return the kernel for a number of rows, or None if the layers' own kernels are to run."""
        if 1 < num_rows <= MAX_SMALL_BATCH:
            return self._small_batch
        if num_rows >= MIN_LARGE_BATCH:
            return self._large_batch
        return None

    def run(
        self, kernel: Kernel, heads: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next layer's queries, keys and values [T, out] and the residual stream [T, hidden].

        `heads` [T, heads * head_size] is the output of a layer's attention. The residual may be overwritten.
        """
        return kernel(heads, residual, *self._operands)


class FusedLayer:
    """A decoder layer with fused blocks before or after it.

    For a number of rows that the block before it has a kernel for, `forward` gets this layer's queries, keys and values
    as x, because the previous layer's `forward` returned them. Both layers see the same number of rows.
    """

    def __init__(
        self, layer: PlainLayer, before: FusedBlock | None, after: FusedBlock | None
    ) -> None:
        self._layer, self._before, self._after = layer, before, after

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the same as `DecoderLayer.forward`, but exchange queries, keys and values with fused neighbors."""
        attention, num_rows = self._layer.attention, positions.shape[0]
        is_projected = self._before is not None and self._before.kernel(num_rows) is not None
        if residual is None or not is_projected:
            x, residual = attention.project(self._layer.input_norm, x, residual)
        heads = attention.attend(x, positions)
        if self._after is not None:
            kernel = self._after.kernel(num_rows)
            if kernel is not None:
                return self._after.run(kernel, heads, residual)
        x, residual = attention.output(heads, residual, wanted)
        return self._layer.finish(x, residual)


def fuse_layers(build: BuildContext, layers: Sequence[Layer]) -> tuple[Layer | FusedLayer, ...]:
    """Return the layers to run, in order, with fused blocks wherever a pair of layers fits the pattern."""
    blocks = [
        _find_block(build, layers[index], layers[index + 1])
        for index in build.each_layer(len(layers) - 1)
    ]
    return tuple(
        FusedLayer(layer, before, after)
        if _is_plain(layer) and (before is not None or after is not None)
        else layer
        for layer, before, after in zip(layers, [None, *blocks], [*blocks, None], strict=True)
    )


def _find_block(build: BuildContext, layer: Layer, next_layer: Layer) -> FusedBlock | None:
    """Return the fused block between two layers, or None if they do not fit the pattern or no kernel fits them.

    The fused ops take no biases, no quantized weights and no experts, SiLU only, and one epsilon for both norms. No
    collective can run inside of them.
    """
    if build.group("attn").size > 1 or build.group("dense").size > 1:
        return None
    if not _is_plain(layer) or not _is_plain(next_layer):
        return None
    out, mlp, qkv = layer.attention.out, layer.mlp, next_layer.attention.qkv
    if type(mlp) is not MLP or mlp.activation != "silu":
        return None
    if layer.post_norm.eps != next_layer.input_norm.eps:
        return None
    linears = (out, mlp.gate_up, mlp.down, qkv)
    if any(each.quantized_weight is not None or each.bias is not None for each in linears):
        return None
    sizes = {
        "in_size": out.in_size,
        "hidden_size": out.out_size,
        "intermediate_size": mlp.down.in_size,
        "out_size": qkv.out_size,
        "dtype": dtype_name(build.dtype),
    }
    small_batch = build.fused("fused_block", **sizes, max_rows=MAX_SMALL_BATCH)
    large_batch = build.fused("fused_block_in_place", **sizes, min_rows=MIN_LARGE_BATCH)
    if small_batch is None and large_batch is None:
        return None
    return FusedBlock(layer, next_layer, mlp, small_batch, large_batch)


def _is_plain(layer: Layer) -> TypeGuard[PlainLayer]:
    """Return whether a layer and its attention are of the shared classes. Subclasses may compute something else."""
    return type(layer) is DecoderLayer and type(layer.attention) is Attention
