"""Changes of logits before a token is chosen: penalties, biases and stop tokens that are not allowed yet.

Each changes only the rows that need it; others keep their bits.
"""

from __future__ import annotations

import numpy as np
import torch

from tokenspeed_core.api.sampling import MAX_LOGIT_BIAS
from tokenspeed_core.api.step import I32, SlotInits
from tokenspeed_core.worker.slots import SlotState, ragged
from tokenspeed_core.worker.transfer import HostDeviceTransfer

_IN_PROMPT = 1 << 30


def counts_bytes(num_slots: int, vocab_size: int) -> int:
    """Return the bytes of the penalties' table, which is allocated on first use."""
    return num_slots * vocab_size * 4


class TokenCounts:
    """How often each token occurs in each slot's sequence, for penalties: int32 [slots, V], allocated on first use.

    The low 30 bits count the output; one bit above says that the prompt has the token.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        """Allocate nothing yet."""
        self._shape = (num_slots, vocab_size)
        self._device = device
        self._counts: torch.Tensor | None = None

    def begin(self, inits: SlotInits, which: I32, transfer: HostDeviceTransfer) -> None:
        """Take the known tokens of the new sequences `which` (indices into the columns)."""
        counts = self._table()
        for index in which.tolist():
            history = inits.history_ids[ragged(inits.history_starts, index)].astype(np.int64)
            num_prompt = int(inits.history_num_prompt[index])
            row = counts[int(inits.slots[index])]
            row.zero_()
            (ids,) = transfer.send((history,))
            row.index_fill_(0, ids[:num_prompt], _IN_PROMPT)
            output = ids[num_prompt:]
            row.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def add(self, slots: torch.Tensor, ids: torch.Tensor, is_new: torch.Tensor) -> None:
        """Count one more token of each slot where `is_new` is 1, not 0. slots, ids int64 [P], is_new int32 [P]."""
        self._table().index_put_((slots, ids), is_new, accumulate=True)

    def of(self, slots: torch.Tensor) -> torch.Tensor:
        """Return a copy of the counts of slots int64 [P], int32 [P, V]."""
        return self._table()[slots]

    def _table(self) -> torch.Tensor:
        if self._counts is None:
            self._counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        return self._counts


def penalize(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    state: SlotState,
) -> None:
    """Change rows of float32 logits [R, V] in place; rows, slots int64 [P], counts those of `TokenCounts` [P, V].

    The repetition penalty divides positive logits of tokens in the prompt or output, and multiplies negative ones.
    The frequency penalty is subtracted once per occurrence in the output, the presence penalty once.
    """
    chosen = logits[rows]
    repetition = state.repetition[slots].unsqueeze(1)
    repeated = torch.where(chosen > 0, chosen / repetition, chosen * repetition)
    chosen = torch.where(counts != 0, repeated, chosen)
    in_output = (counts & (_IN_PROMPT - 1)).to(torch.float32)
    chosen -= state.frequency[slots].unsqueeze(1) * in_output
    chosen -= state.presence[slots].unsqueeze(1) * (in_output > 0)
    logits[rows] = chosen


class Biases:
    """The logit biases of each slot: ids int64 and values float32 [slots, MAX_LOGIT_BIAS], padded with +0 at id 0."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        """Allocate."""
        self._ids = torch.zeros(num_slots, MAX_LOGIT_BIAS, dtype=torch.int64, device=device)
        self._values = torch.zeros(num_slots, MAX_LOGIT_BIAS, dtype=torch.float32, device=device)

    def begin(self, inits: SlotInits, which: I32, transfer: HostDeviceTransfer) -> None:
        """Take the biases of the new sequences `which` (indices into the columns)."""
        ids = np.zeros((len(which), MAX_LOGIT_BIAS), np.int64)
        values = np.zeros((len(which), MAX_LOGIT_BIAS), np.float32)
        for row, index in enumerate(which.tolist()):
            part = ragged(inits.bias_starts, index)
            ids[row, : part.stop - part.start] = inits.bias_ids[part]
            values[row, : part.stop - part.start] = inits.bias_values[part]
        slots, device_ids, device_values = transfer.send(
            (inits.slots[which].astype(np.int64), ids, values)
        )
        self._ids.index_copy_(0, slots, device_ids)
        self._values.index_copy_(0, slots, device_values)

    def add(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Add to rows of float32 logits [R, V] in place; rows, slots int64 [P]."""
        logits[rows] = logits[rows].scatter_add_(1, self._ids[slots], self._values[slots])


class EndIds:
    """The stop tokens that each slot's sequence may not choose yet, and for how many more tokens (`min_tokens`).

    The ids are int64 [slots, W], allocated on first use.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        """Allocate no tokens yet."""
        self._num_left = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self._ids = torch.zeros(num_slots, 0, dtype=torch.int64, device=device)

    def begin(self, inits: SlotInits, which: I32, transfer: HostDeviceTransfer) -> None:
        """Take the ids of the new sequences `which` (indices into the columns), each at least one."""
        parts = [inits.end_ids[ragged(inits.end_starts, index)] for index in which.tolist()]
        width = max(self._ids.shape[1], *map(len, parts))
        # Repeating an id has no effect.
        ids = np.stack([np.resize(part, width) for part in parts]).astype(np.int64)
        slots, device_ids, num_left = transfer.send(
            (inits.slots[which].astype(np.int64), ids, inits.num_endless[which])
        )
        self._num_left.index_copy_(0, slots, num_left)
        if width > self._ids.shape[1]:
            wider = self._ids.new_zeros(len(self._ids), width)
            # Slots that were set before repeat their first id.
            wider[:, : self._ids.shape[1]] = self._ids
            if self._ids.shape[1]:
                wider[:, self._ids.shape[1] :] = self._ids[:, :1]
            self._ids = wider
        self._ids.index_copy_(0, slots, device_ids)

    def forbid(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        slots: torch.Tensor,
        num_before: torch.Tensor | None,
    ) -> None:
        """Set the logits of these tokens to -inf, in place, in rows of logits [R, V]; rows, slots int64 [P].

        `num_before` int64 [P] is the number of draft tokens before each row's new token; None: none.
        """
        chosen, ids, num_left = logits[rows], self._ids[slots], self._num_left[slots]
        is_endless = num_left > (0 if num_before is None else num_before)
        found = chosen.gather(1, ids).masked_fill_(is_endless.unsqueeze(1), float("-inf"))
        logits[rows] = chosen.scatter_(1, ids, found)

    def note(self, slots: torch.Tensor, is_new: torch.Tensor) -> None:
        """Count a new token of each slot where `is_new` is 1, not 0. slots int64 [P], is_new int32 [P]."""
        self._num_left.index_add_(0, slots, is_new, alpha=-1)
