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
    """The part of the vocabulary on this process: `size` entries, starting at `first`."""

    def __init__(self, build: BuildContext, vocab_size: int) -> None:
        group = build.group("attn")
        self.shard = Shard(0, "attn", num_rows=vocab_size)
        self.size = self.shard.local_size("vocabulary", vocab_size, build.group)
        self.is_whole, self.padded_size = group.size == 1, group.size * self.size
        self.first = group.rank * self.size
        self.num_rows = max(0, min(self.size, vocab_size - self.first))  # without padding

    def make_weight(self, build: BuildContext, hidden_size: int) -> torch.Tensor:
        """Return a weight [size + 1, hidden] of which all but `num_rows` rows are zero; [size, hidden] if whole."""
        num_rows = self.size if self.is_whole else self.size + 1
        weight = torch.empty(num_rows, hidden_size, dtype=build.dtype, device=build.device)
        weight[self.num_rows :].zero_()
        return weight

    def slot(self, name: str, weight: torch.Tensor) -> WeightSlot:
        """Return the slot of such a weight."""
        return WeightSlot(f"{name}.weight", weight[: self.num_rows], self.shard)


class Embedding:
    """The token embedding, multiplied by `scale`, which is rounded to the dtype first.

    The vocabulary is sharded over the processes of the group "attn", each of which has the same number of rows. The
    last ones are padding if the vocabulary cannot be divided.
    """

    def __init__(
        self, build: BuildContext, vocab_size: int, hidden_size: int, *, scale: float = 1.0
    ) -> None:
        self.vocab = vocab = VocabShard(build, vocab_size)
        self._rows = vocab.make_weight(build, hidden_size)
        self.weight = self._rows[: vocab.size]
        self._row_of: torch.Tensor | None = None
        if not vocab.is_whole:
            # The row of each id; tokens of other processes have the last one, which is zero.
            self._row_of = torch.full((vocab_size,), vocab.size, device=build.device)
            own = torch.arange(vocab.num_rows, device=build.device)
            self._row_of[vocab.first : vocab.first + vocab.num_rows] = own
        self._scale = float(torch.tensor(scale, dtype=build.dtype))

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return a new tensor [T, hidden] for int64 ids [T], with zeros for ids of other processes."""
        rows = token_ids if self._row_of is None else self._row_of.index_select(0, token_ids)
        x = functional.embedding(rows, self._rows)
        return x if self._scale == 1.0 else x.mul_(self._scale)

    def slots(self, name: str) -> Iterator[WeightSlot]:
        """List the weight."""
        yield self.vocab.slot(name, self.weight)

    def sharding(self, name: str) -> Iterator[ShardingSpec]:
        """The input is replicated; the output is a partial sum, zero for ids of other processes."""
        yield ShardingSpec(name, Replicated(), Partial(("attn",)), self.weight.shape[1])


class OutputHead:
    """Maps hidden states to logits, with its own weight or the embedding's.

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
            self.vocab.make_weight(build, hidden_size)[: self.vocab.size]
            if tied_to is None
            else tied_to.weight
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
