"""Token embedding and output head, which may share one weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from tokenspeed_core.api import SAMPLING, BuildContext
from tokenspeed_models.layers.ops import dtype_name
from tokenspeed_models.sharding import Partial, Replicated, Sharded, ShardingSpec
from tokenspeed_models.weights import Shard, WeightSlot


class VocabShard:
    """The entries `first` to `first + size` of a vocabulary, whose rows this process holds."""

    def __init__(self, build: BuildContext, vocab_size: int) -> None:
        group = build.group("attn")
        self.shard = Shard(0, "attn", num_rows=vocab_size)
        self.size = self.shard.local_size("vocabulary", vocab_size, build.group)
        self.first, self.is_whole = group.rank * self.size, group.size == 1
        self.padded_size = group.size * self.size
        self._num_rows = max(0, min(self.size, vocab_size - self.first))

    def make_weight(self, build: BuildContext, hidden_size: int) -> torch.Tensor:
        """Return an uninitialised weight [size, hidden], of which padding is zero."""
        weight = torch.empty(self.size, hidden_size, dtype=build.dtype, device=build.device)
        weight[self._num_rows :].zero_()
        return weight

    def slot(self, name: str, weight: torch.Tensor) -> WeightSlot:
        """Return the slot of such a weight."""
        return WeightSlot(f"{name}.weight", weight[: self._num_rows], self.shard)


class Embedding:
    """The token embedding, multiplied by `scale`, which is rounded to the dtype first.

    The vocabulary is sharded over the processes of the group "attn", each of which has the same number of rows. The
    last ones are padding if the vocabulary cannot be divided.
    """

    def __init__(
        self, build: BuildContext, vocab_size: int, hidden_size: int, *, scale: float = 1.0
    ) -> None:
        self.vocab = VocabShard(build, vocab_size)
        self.weight = self.vocab.make_weight(build, hidden_size)
        self._scale = float(torch.tensor(scale, dtype=build.dtype))

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return a new tensor [T, hidden] for int64 ids [T], zero for those of other processes."""
        if self.vocab.is_whole:
            x = functional.embedding(token_ids, self.weight)
        else:
            rows = token_ids - self.vocab.first
            x = functional.embedding(rows.clamp(0, self.vocab.size - 1), self.weight)
            x.masked_fill_(((rows < 0) | (rows >= self.vocab.size)).unsqueeze(1), 0.0)
        return x if self._scale == 1.0 else x.mul_(self._scale)

    def slots(self, name: str) -> Iterator[WeightSlot]:
        """List the weight."""
        yield self.vocab.slot(name, self.weight)

    def sharding(self, name: str) -> Iterator[ShardingSpec]:
        """The input is replicated; the output is a partial sum, zero for ids of other processes."""
        yield ShardingSpec(name, Replicated(), Partial(("attn",)), self.weight.shape[1])


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
        self.vocab_size = vocab_size
        self.vocab = VocabShard(build, vocab_size)
        self.weight = (
            self.vocab.make_weight(build, hidden_size) if tied_to is None else tied_to.weight
        )
        self._linear = build.op(
            "linear", in_size=hidden_size, out_size=self.vocab.size, dtype=dtype_name(build.dtype)
        )

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return this process's logits [R, vocab] for hidden states [R, hidden]."""
        logits: torch.Tensor = self._linear(hidden, self.weight, None)
        if self._soft_cap is not None:
            logits.div_(self._soft_cap).tanh_().mul_(self._soft_cap)
        return logits

    def slots(self, name: str) -> Iterator[WeightSlot]:
        """List the weight, unless it is the embedding's."""
        if not self.is_tied:
            yield self.vocab.slot(name, self.weight)

    def sharding(self, name: str) -> Iterator[ShardingSpec]:
        """The output is sharded on the vocabulary; sampling needs it replicated."""
        vocab, size = Sharded("vocab", "attn"), self.vocab.padded_size
        yield ShardingSpec(name, Replicated(), vocab, size)
        yield ShardingSpec(SAMPLING, Replicated(), Replicated(), size)
