"""A causal language model: embedding, decoder layers, final norm and output head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers.decoder import Layer
from tokenspeed_models.layers.embedding import Embedding, OutputHead
from tokenspeed_models.layers.fusion import fuse_layers
from tokenspeed_models.layers.norm import RMSNorm
from tokenspeed_models.sharding import (
    ShardingSpec,
    bind_output,
    compile_sharding,
    fuse_input,
)
from tokenspeed_models.weights import WeightMap


class CausalLM:
    """Implements the core's `Model`. A family subclasses it and passes its layers.

    `renames` maps parts of weight names to those that the family's published checkpoints have instead.
    `num_draft_layers` are layers after the last one that checkpoints hold for speculative decoding. They belong to a
    `MultiTokenPredictor` and are not read here.
    """

    renames: Mapping[str, str] = {}

    def __init__(
        self,
        build: BuildContext,
        layers: Sequence[Layer],
        *,
        embedding: Embedding,
        norm: RMSNorm,
        head: OutputHead,
        num_draft_layers: int = 0,
    ) -> None:
        self.layers, self._num_draft_layers = tuple(layers), num_draft_layers
        self._fused_layers = fuse_layers(build, self.layers)
        self.embedding, self.norm, self.head = embedding, norm, head
        self._embed: Callable[[torch.Tensor], torch.Tensor] = embedding
        self._head: Callable[[torch.Tensor], torch.Tensor] = head
        self._groups = build.group
        # Data-parallel processes exchange the numbers of all tokens, not of the wanted rows.
        self._has_own_tokens = build.group("data").size > 1
        compile_sharding(build, self.sharding())

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return hidden states [R, hidden] of the rows in `wanted` (int64 [R]; None: all).

        token_ids and positions are int64 [T].
        """
        x, residual = self.embed(token_ids), None
        for layer in self._fused_layers[:-1]:
            x, residual = layer.forward(x, residual, positions)
        if self._has_own_tokens:
            x, residual = self._fused_layers[-1].forward(x, residual, positions)
            hidden = self.norm.add(x, residual)[0]
            return hidden if wanted is None else hidden[wanted]
        x, residual = self._fused_layers[-1].forward(x, residual, positions, wanted)
        return self.norm.add(x, residual)[0]

    def forward_and_capture(
        self, token_ids: torch.Tensor, positions: torch.Tensor, layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden states [T, hidden] of all rows, and the residual stream before some layers, concatenated."""
        x, residual = self.embed(token_ids), None
        captured: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in layers:
                captured[index] = x.clone() if residual is None else x + residual
            x, residual = layer.forward(x, residual, positions)
        assert residual is not None, "a model has layers"
        hidden = self.norm.add(x, residual)[0]
        return hidden, torch.cat([captured[index] for index in layers], dim=-1)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [T, hidden] of int64 ids [T]."""
        return self._embed(token_ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [R, vocab], in the model's dtype, of hidden states [R, hidden]."""
        return self._head(hidden)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy a checkpoint's weights. Raises ValueError naming each that is missing, unexpected or misshapen."""
        self.weight_map().load(weights)

    def weight_map(self) -> WeightMap:
        """Return the map from checkpoint names to parameters.

        If the head is tied, a copy of the embedding that a checkpoint stores for it is ignored.
        """
        slots = [
            *self.embedding.slots("model.embed_tokens"),
            *self.norm.slots("model.norm"),
            *self.head.slots("lm_head"),
        ]
        for index, layer in enumerate(self.layers):
            slots.extend(layer.slots(f"model.layers.{index}."))
        ignored = [f"{self.draft_layer_name(index)}." for index in range(self._num_draft_layers)]
        if self.head.is_tied:
            ignored.append("lm_head.weight")
        return WeightMap(slots, ignored, self.renames, self._groups)

    def draft_layer_name(self, index: int) -> str:
        """Return the name in the checkpoint of a layer for speculative decoding, such as "model.layers.61"."""
        return f"model.layers.{len(self.layers) + index}"

    def sharding(self) -> Iterator[ShardingSpec]:
        """List the sharding specs of all modules in order of computation."""
        yield from self.embedding_sharding()
        for index, layer in enumerate(self.layers):
            yield from layer.sharding(f"layers.{index}.")
        yield from fuse_input(self.norm.sharding("norm"), self.norm.fuse_sum)
        yield from self.head_sharding()

    def embedding_sharding(self) -> Iterator[ShardingSpec]:
        """List the sharding spec of the embedding, also for a draft model that calls `embed`."""
        yield from bind_output(self.embedding.sharding("embedding"), self._bind_embedding)

    def head_sharding(self) -> Iterator[ShardingSpec]:
        """List the sharding specs of the head and of sampling, also for a draft model that calls `logits`."""
        head, sampling = self.head.sharding("head")
        yield from bind_output((head,), self._bind_head)
        yield sampling

    def _bind_embedding(self, collective: Callable[[torch.Tensor], torch.Tensor]) -> None:
        def embed(token_ids: torch.Tensor) -> torch.Tensor:
            return collective(self.embedding(token_ids))

        self._embed = embed

    def _bind_head(self, collective: Callable[[torch.Tensor], torch.Tensor]) -> None:
        size = self.head.vocab_size

        def head(hidden: torch.Tensor) -> torch.Tensor:
            return collective(self.head(hidden))[:, :size]

        self._head = head
