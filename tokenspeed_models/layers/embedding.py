"""Token embedding and output head, which may share one weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from tokenspeed_core.api import BuildContext
from tokenspeed_models.layers.ops import dtype_name
from tokenspeed_models.sharding import Partial, Replicated, Sharded, ShardingSpec
from tokenspeed_models.weights import Shard, WeightSlot


class Embedding:
    """The token embedding, multiplied by `scale`, which is rounded to the dtype first.

    The vocabulary is sharded over the processes of the attention group.
    """

    def __init__(
        self, build: BuildContext, vocab_size: int, hidden_size: int, *, scale: float = 1.0
    ) -> None:
        self.weight = torch.empty(vocab_size, hidden_size, dtype=build.dtype, device=build.device)
        self._scale = float(torch.tensor(scale, dtype=build.dtype))

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return a new tensor [T, hidden] for int64 ids [T]."""
        x = functional.embedding(token_ids, self.weight)
        return x if self._scale == 1.0 else x.mul_(self._scale)

    def slots(self, name: str) -> Iterator[WeightSlot]:
        """List the weight."""
        yield WeightSlot(f"{name}.weight", self.weight, Shard(0, "attn"))

    def sharding(self, name: str) -> Iterator[ShardingSpec]:
        """The input is replicated; the output is a partial sum, zero for ids of other processes."""
        yield ShardingSpec(name, "attn", Replicated(), Partial())


class OutputHead:
    """Maps hidden states to logits, with its own weight or that of the embedding.

    With a `soft_cap` c, logits are c * tanh(logits / c), which is between -c and c.
    """

    def __init__(
        self,
        build: BuildContext,
        vocab_size: int,
        hidden_size: int,
        tied_to: Embedding | None,
        *,
        soft_cap: float | None = None,
    ) -> None:
        self.is_tied, self._soft_cap = tied_to is not None, soft_cap
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
        logits: torch.Tensor = self._linear(hidden, self.weight, None)
        if self._soft_cap is not None:
            logits.div_(self._soft_cap).tanh_().mul_(self._soft_cap)
        return logits

    def slots(self, name: str) -> Iterator[WeightSlot]:
        """List the weight, unless it is the embedding's."""
        if not self.is_tied:
            yield WeightSlot(f"{name}.weight", self.weight, Shard(0, "attn"))

    def sharding(self, name: str) -> Iterator[ShardingSpec]:
        """The output is sharded on the vocabulary; sampling needs it replicated."""
        yield ShardingSpec(name, "attn", Replicated(), Sharded("vocab"))
        yield ShardingSpec("sampling", "attn", Replicated(), Replicated())
