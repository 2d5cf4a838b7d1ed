"""The decoder that all families here share: layers of attention and MLP (or experts) on a residual stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers.attention import Attention
from tokenspeed_models.layers.embedding import Embedding, OutputHead
from tokenspeed_models.layers.mlp import MLP
from tokenspeed_models.layers.moe import MoE
from tokenspeed_models.layers.norm import RMSNorm
from tokenspeed_models.layers.ops import dtype_name
from tokenspeed_models.sharding import ShardingSpec
from tokenspeed_models.weights import WeightMap, WeightSlot

FEW_ROWS = 64  # so many rows are bound by reading weights and by the waits between kernels; one has its own kernels
MANY_ROWS = 512  # so many are bound by the matrix units, and by what else takes power beside them

Fused = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class DecoderLayer:
    """Attention, then an MLP or a mixture of experts, each normalised before it and added after it.

    The addition after a block is left to the next one, where it is fused with the norm and the first projection.
    `CausalLM` calls attention in its halves, since what stands between two layers' attention can be one kernel.
    """

    def __init__(
        self,
        build: BuildContext,
        hidden_size: int,
        norm_eps: float,
        attention: Attention,
        mlp: MLP | MoE,
    ) -> None:
        self.input_norm, self.attention = RMSNorm(build, hidden_size, norm_eps), attention
        self.post_norm, self.mlp = RMSNorm(build, hidden_size, norm_eps), mlp

    def after_attention(
        self, heads: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is to be added to the residual stream [T, hidden], and the stream, perhaps over the given one."""
        return self.mlp(self.post_norm, self.attention.out(heads), residual)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        """List the weights, by the names that these families' checkpoints share."""
        yield from self.input_norm.slots(f"{prefix}input_layernorm")
        yield from self.attention.slots(f"{prefix}self_attn.")
        yield from self.post_norm.slots(f"{prefix}post_attention_layernorm")
        yield from self.mlp.slots(f"{prefix}mlp.")

    def sharding(self, prefix: str) -> Iterator[ShardingSpec]:
        """List the placements in the order of computation."""
        yield from self.input_norm.sharding(f"{prefix}input_norm", "attn")
        yield from self.attention.sharding(f"{prefix}attention.")
        yield from self.post_norm.sharding(f"{prefix}post_norm", "attn")
        yield from self.mlp.sharding(f"{prefix}mlp.")


class BetweenAttention:
    """What stands between two layers' attention: fused for few rows, and for many, where kernels are; else the layers'.

    A fused kernel has no place for a collective, for biases, for experts or for quantised weights.
    """

    def __init__(self, build: BuildContext, layer: DecoderLayer, after: DecoderLayer) -> None:
        self.layer, self._after = layer, after
        out, mlp, qkv = layer.attention.out, layer.mlp, after.attention.qkv
        self._few: Fused | None = None
        self._many: Fused | None = None
        if isinstance(mlp, MLP) and layer.post_norm.eps == after.input_norm.eps:
            maps = (out, mlp.gate_up, mlp.down, qkv)
            if all(each.quantized_weight is None and each.bias is None for each in maps):
                sizes = {
                    "in_size": out.in_size,
                    "hidden_size": out.out_size,
                    "intermediate_size": mlp.down.in_size,
                    "out_size": qkv.out_size,
                    "dtype": dtype_name(build.dtype),
                }
                self._few = build.fused("fused_block", **sizes, max_rows=FEW_ROWS)
                self._many = build.fused("fused_block_in_place", **sizes, min_rows=MANY_ROWS)
                self._weights = (
                    out.weight,
                    layer.post_norm.weight,
                    mlp.gate_up.weight,
                    mlp.down.weight,
                    after.input_norm.weight,
                    qkv.weight,
                    layer.post_norm.eps,
                )

    def __call__(
        self, heads: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next layer's queries, keys and values [T, out] for what a layer's heads saw, and the stream.

        The residual stream [T, hidden] may be overwritten.
        """
        num_rows = heads.shape[0]
        fused = (
            self._few if 1 < num_rows <= FEW_ROWS else self._many if num_rows >= MANY_ROWS else None
        )
        if fused is not None:
            return fused(heads, residual, *self._weights)
        x, residual = self.layer.after_attention(heads, residual)
        return self._after.attention.project(self._after.input_norm, x, residual)


class CausalLM:
    """A decoder with embedding, layers, final norm and output head; satisfies the core's `Model`.

    A family subclasses it and passes its layers.
    """

    def __init__(
        self,
        build: BuildContext,
        layers: Sequence[DecoderLayer],
        *,
        vocab_size: int,
        hidden_size: int,
        norm_eps: float,
        tie_embeddings: bool,
    ) -> None:
        self.layers = tuple(layers)
        self._between = [
            BetweenAttention(build, self.layers[i], self.layers[i + 1])
            for i in build.each_layer(len(layers) - 1)
        ]
        self.embedding = Embedding(build, vocab_size, hidden_size)
        self.norm = RMSNorm(build, hidden_size, norm_eps)
        self.head = OutputHead(
            build, vocab_size, hidden_size, self.embedding if tie_embeddings else None
        )

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return hidden states [R, hidden] of `wanted` (int64 [R]; None: all) of T int64 token ids at positions [T].

        The last layer needs keys and values of all tokens; all that comes behind its attention, only those wanted.
        """
        first, last = self.layers[0], self.layers[-1]
        qkv, residual = first.attention.project(first.input_norm, self.embedding(token_ids), None)
        for between in self._between:
            qkv, residual = between(between.layer.attention.attend(qkv, positions), residual)
        heads = last.attention.attend(qkv, positions)
        if wanted is not None:
            heads, residual = heads.index_select(0, wanted), residual.index_select(0, wanted)
        return self.norm.add(*last.after_attention(heads, residual))[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [R, vocab], in the model's dtype, of hidden states [R, hidden]."""
        return self.head(hidden)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy a checkpoint in. Raises ValueError naming every missing, surplus or misshapen weight."""
        self.weight_map().load(weights)

    def weight_map(self) -> WeightMap:
        """Return the map from checkpoint names to parts of parameters.

        A tied head that a checkpoint stores all the same is a copy of the embedding, and is not read.
        """
        slots = [
            *self.embedding.slots("model.embed_tokens"),
            *self.norm.slots("model.norm"),
            *self.head.slots("lm_head"),
        ]
        for index, layer in enumerate(self.layers):
            slots.extend(layer.slots(f"model.layers.{index}."))
        return WeightMap(slots, ignored=("lm_head.weight",) if self.head.is_tied else ())

    def sharding(self) -> Iterator[ShardingSpec]:
        """List the placements of activations at module sharding, in the order of computation."""
        yield from self.embedding.sharding("embedding")
        for index, layer in enumerate(self.layers):
            yield from layer.sharding(f"layers.{index}.")
        yield from self.norm.sharding("norm", "attn")
        yield from self.head.sharding("head")
