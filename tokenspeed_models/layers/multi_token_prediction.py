"""Multi-token prediction: a decoder layer that drafts the token after the next one (DeepSeek-V3, arXiv:2412.19437)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers.causal_lm import CausalLM
from tokenspeed_models.layers.decoder import Layer
from tokenspeed_models.layers.linear import Linear, Projection
from tokenspeed_models.layers.norm import RMSNorm
from tokenspeed_models.layers.scheme import UnquantizedBuild
from tokenspeed_models.sharding import Replicated, ShardingSpec, compile_sharding, fuse_input
from tokenspeed_models.weights import WeightMap


class MultiTokenPredictor:
    """Implements the core's `DraftModel` with one decoder layer; embedding and head are the target's.

    The layer's input concatenates two normalized vectors: the embedding of a token, and the target's hidden state of the
    token before, taken after the target's final norm. With `is_hidden_first`, the hidden state comes first. In the next
    pass, the layer's own normalized output replaces the target's hidden state. `name` is the layer's name in the
    checkpoint, such as "model.layers.61".
    """

    def __init__(
        self,
        build: BuildContext,
        target: CausalLM,
        layer: Layer,
        *,
        name: str,
        hidden_size: int,
        norm_eps: float,
        is_hidden_first: bool = False,
    ) -> None:
        self._target, self._layer, self._name = target, layer, name
        self._groups, self._is_hidden_first = build.group, is_hidden_first
        self._embedding_norm = RMSNorm(build, hidden_size, norm_eps)
        self._hidden_norm = RMSNorm(build, hidden_size, norm_eps)
        joined = (Projection("eh_proj", hidden_size, None),)
        # DeepSeek-V3 stores it in bfloat16, although its quantization_config does not except it.
        self._join = Linear(UnquantizedBuild(build), 2 * hidden_size, joined)
        self._norm = RMSNorm(build, hidden_size, norm_eps)
        whole = ShardingSpec("eh_proj", Replicated(), Replicated(), hidden_size)
        norm = fuse_input(self._norm.sharding("norm"), self._norm.fuse_sum)
        start = (*target.embedding_sharding(), *self._embedding_norm.sharding("embedding_norm"))
        end = (*layer.sharding(""), *norm, *target.head_sharding())
        compile_sharding(build, (*start, whole, *end))

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the target's hidden states [T, hidden] unchanged."""
        return hidden

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor | None,
        wanted: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return hidden states [R, hidden] of `wanted`. token_ids [T] follow the positions [T] of hidden [T, hidden]."""
        assert hidden is not None, "multi-token prediction reads hidden states"
        embedded = self._embedding_norm(self._target.embed(token_ids))
        inputs = (embedded, self._hidden_norm(hidden))
        x = self._join(torch.cat(inputs[::-1] if self._is_hidden_first else inputs, dim=-1))
        x, residual = self._layer.forward(x, None, positions, wanted)
        return self._norm.add(x, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the target head's logits [R, vocab] of hidden states [R, hidden]."""
        return self._target.logits(hidden)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the layer's weights. Raises ValueError as `CausalLM.load_weights` does, and if there are none.

        Checkpoints hold copies of the embedding and the head, which are not read.
        """
        prefix = f"{self._name}."
        own = (each for each in weights if each[0].startswith(prefix))
        first = next(own, None)
        if first is None:  # a quantized copy may keep the config.json of the original
            raise ValueError(
                f"the checkpoint has no weights of its layer for multi-token prediction, {self._name}. "
                "Use a checkpoint with these weights, or choose another drafter."
            )
        self.weight_map().load(chain((first,), own))

    def weight_map(self) -> WeightMap:
        """Return the map from checkpoint names to parameters."""
        slots = [
            *self._embedding_norm.slots(f"{self._name}.enorm"),
            *self._hidden_norm.slots(f"{self._name}.hnorm"),
            *self._join.slots(f"{self._name}."),
            *self._norm.slots(f"{self._name}.shared_head.norm"),
            *self._layer.slots(f"{self._name}."),
        ]
        copies = [f"{self._name}.embed_tokens.weight", f"{self._name}.shared_head.head.weight"]
        return WeightMap(slots, copies, self._target.renames, self._groups)
