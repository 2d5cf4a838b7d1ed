"""Token embedding and output head, whose weights may be one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers.packed import dtype_name
from tokenspeed_models.placement import Boundary, Partial, Replicated, Sharded
from tokenspeed_models.weights import Shard, WeightSlot


class Embedding:
    """Looks up a row per token id. Over several processes each holds a part of the vocabulary."""

    def __init__(self, build: BuildContext, vocab_size: int, hidden_size: int) -> None:
        self.weight = torch.empty(vocab_size, hidden_size, dtype=build.dtype, device=build.device)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return a new tensor [T, hidden] for int64 ids [T]."""
        return functional.embedding(token_ids, self.weight)

    def slots(self, name: str) -> Iterator[WeightSlot]:
        """List the weight."""
        yield WeightSlot(f"{name}.weight", self.weight, Shard(0, "attn"))

    def boundaries(self, name: str) -> Iterator[Boundary]:
        """Take all ids, give zeros for the ids of other processes."""
        yield Boundary(name, "attn", Replicated(), Partial())


class OutputHead:
    """Maps hidden states to logits, with a weight of its own or the embedding's."""

    def __init__(
        self, build: BuildContext, vocab_size: int, hidden_size: int, tied_to: Embedding | None
    ) -> None:
        self.is_tied = tied_to is not None
        self.weight = (
            torch.empty(vocab_size, hidden_size, dtype=build.dtype, device=build.device)
            if tied_to is None
            else tied_to.weight
        )
        self._linear = build.op(
            "linear", in_size=hidden_size, out_size=vocab_size, dtype=dtype_name(build.dtype)
        )

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [R, vocab] for hidden states [R, hidden]."""
        result: torch.Tensor = self._linear(hidden, self.weight, None)
        return result

    def slots(self, name: str) -> Iterator[WeightSlot]:
        """List the weight, unless it is the embedding's."""
        if not self.is_tied:
            yield WeightSlot(f"{name}.weight", self.weight, Shard(0, "attn"))

    def boundaries(self, name: str) -> Iterator[Boundary]:
        """Take whole rows, give a part of the vocabulary; then sampling takes it whole."""
        yield Boundary(name, "attn", Replicated(), Sharded("vocab"))
        yield Boundary("sampling", "attn", Replicated(), Replicated())
