"""The device's state of each slot: one flat tensor, written by one scatter per step.

Every per-slot column and block table is a view of `SlotState.words` (int32), so that all deltas of a
plan become one list of (word, value) pairs: one copy to the device and one scatter kernel there, or one
NumPy assignment on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tokenspeed_core.api.step import I32, I64, BlockDelta, Bool, SlotInits, StepPlan

_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_COLUMNS = ("last_token", "seq_len", "top_k", *_FLOATS)


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The place of each column in the state, in words.

    `num_slots` includes the padding slot, which is the last. A block table has `num_blocks` entries per slot. At most
    `max_drafts` draft tokens of a slot are verified in a step.
    """

    num_slots: int
    num_blocks: int
    num_groups: int
    max_drafts: int = 0

    @property
    def padding_slot(self) -> int:
        """The slot of padding rows."""
        return self.num_slots - 1

    @property
    def padding(self) -> tuple[int, int]:
        """The padding slot, and the word of its length, which is always 0."""
        return self.padding_slot, self.column("seq_len") + self.padding_slot

    def column(self, name: str) -> int:
        """Return the index of the first word of a column. Seeds, of two words each, come first."""
        return 0 if name == "seed" else (2 + _COLUMNS.index(name)) * self.num_slots

    def table(self, group: int) -> int:
        """Return the index of the first word of a cache group's block tables."""
        return (2 + len(_COLUMNS) + group * self.num_blocks) * self.num_slots

    @property
    def drafts(self) -> int:
        """The index of the first word of the draft tokens. Each slot has `max_drafts` words."""
        return self.table(self.num_groups)

    @property
    def last_tokens(self) -> tuple[int, int]:
        """The index of the first word of the last tokens, and their number. As many lengths follow them."""
        return self.column("last_token"), self.num_slots

    @property
    def num_words(self) -> int:
        """All words of the state."""
        return self.drafts + self.max_drafts * self.num_slots

    def writes(self, plan: StepPlan) -> tuple[I64, I32]:
        """Return the words that a plan changes and their new values, in the plan's order.

        Chunk rows set their exact length; decode rows keep the device's. Raises ValueError for too many draft tokens.
        """
        words: list[I64] = []
        values: list[I32] = []
        for group, delta in enumerate(plan.block_deltas):
            if len(delta.slots):
                words.append(
                    self.table(group)
                    + delta.slots.astype(np.int64) * self.num_blocks
                    + delta.indices
                )
                values.append(delta.blocks)
        if plan.num_decodes < plan.num_rows:
            words.append(self.column("seq_len") + plan.slots[plan.num_decodes :].astype(np.int64))
            values.append(plan.num_computed_tokens[plan.num_decodes :])
        if plan.slot_inits is not None:
            self._init_writes(plan.slot_inits, words, values)
        if plan.draft_token_ids is not None:
            words.append(self._draft_words(plan))
            values.append(plan.draft_token_ids)
        if not words:
            return _NO_WORDS, _NO_VALUES
        if len(words) == 1:
            return words[0], values[0]
        return np.concatenate(words), np.concatenate(values)

    def _draft_words(self, plan: StepPlan) -> I64:
        """Return the words of a plan's draft tokens. Raises ValueError if a row has more than `max_drafts`."""
        if plan.num_decodes == 1 and plan.num_draft_tokens <= self.max_drafts:
            start = self.drafts + plan.slots.item(0) * self.max_drafts
            return np.arange(start, start + plan.num_draft_tokens)
        counts = plan.num_query_tokens[: plan.num_decodes] - 1
        most = max(counts.tolist(), default=0)
        if most > self.max_drafts:
            raise ValueError(
                f"a row has {most} draft tokens, but a slot holds at most {self.max_drafts}"
            )
        first = self.drafts + plan.slots[: plan.num_decodes].astype(np.int64) * self.max_drafts
        # Token i of the plan is token i - before of its row.
        before = counts.cumsum() - counts
        words: I64 = np.arange(plan.num_draft_tokens) + (first - before).repeat(counts)
        return words

    def _init_writes(self, inits: SlotInits, words: list[I64], values: list[I32]) -> None:
        slots = inits.slots.astype(np.int64)
        words.append((slots[:, None] * 2 + np.arange(2)).reshape(-1))
        values.append(np.ascontiguousarray(inits.seed).view(np.int32))
        words.append(self.column("top_k") + slots)
        values.append(inits.top_k)
        for name in _FLOATS:
            words.append(self.column(name) + slots)
            values.append(np.ascontiguousarray(getattr(inits, name)).view(np.int32))


_NO_WORDS: I64 = np.zeros(0, np.int64)
_NO_VALUES: I32 = np.zeros(0, np.int32)


class SlotState:
    """The state of all slots on a device, and typed views of its columns and tables. All views share memory.

    Padding rows use the last slot. Its length stays 0, and its tables contain only blocks of the padding page, which
    are never read.
    """

    def __init__(self, layout: SlotLayout, device: torch.device) -> None:
        """Allocate."""
        self.layout = layout
        self.words = torch.zeros(layout.num_words, dtype=torch.int32, device=device)
        self.seed = self.words[: 2 * layout.num_slots].view(torch.int64)
        self.last_token = self._column("last_token")
        self.seq_len = self._column("seq_len")
        self.top_k = self._column("top_k")
        self.temperature, self.top_p, self.min_p, self.presence, self.frequency, self.repetition = (
            self._column(name).view(torch.float32) for name in _FLOATS
        )
        self.tables: tuple[torch.Tensor, ...] = tuple(
            self.words[layout.table(g) : layout.table(g + 1)].view(
                layout.num_slots, layout.num_blocks
            )
            for g in range(layout.num_groups)
        )
        self.drafts = self.words[layout.drafts :].view(layout.num_slots, layout.max_drafts)

    def reset(self, padding_blocks: Sequence[int]) -> None:
        """Reset all slots: greedy, empty, and all blocks of each group its padding block."""
        self.words.zero_()
        for table, block in zip(self.tables, padding_blocks, strict=True):
            table.fill_(block)
        self.repetition.fill_(1.0)
        self.top_p.fill_(1.0)

    def _column(self, name: str) -> torch.Tensor:
        start = self.layout.column(name)
        return self.words[start : start + self.layout.num_slots]


SHARED_PREFIX = 256  # tokens; reading a shorter shared prefix is faster than searching for it
SHARING_ROWS = 9  # minimum of rows that share it: with fewer, repeated reads hit the L2 cache
SHORT = 4096  # maximum number of tokens of a sequence in a step without shared-prefix attention
DRAWS, SPECIAL = 1, 2
"""Bits of a slot's sampling. DRAWS: its tokens are drawn at random. SPECIAL: it has penalties, biases, processors,
log-probabilities or `min_tokens`."""


class SlotFlags:
    """The host's flags of each slot, to choose how a step runs without asking the device."""

    def __init__(self, num_slots: int, num_groups: int, block_size: int) -> None:
        """Start with greedy slots."""
        self._last = (SHARED_PREFIX - 1) // block_size  # index of the last block of such a prefix
        self._prefix_ends = np.zeros((num_groups, num_slots), np.int32)
        self.asks = np.zeros(num_slots, np.uint8)
        self.penalized = np.zeros(num_slots, bool)
        self.biased = np.zeros(num_slots, bool)
        self.num_logprobs = np.full(num_slots, -1, np.int32)
        self.num_endless = np.zeros(num_slots, np.int32)
        self.processed = np.zeros(num_slots, bool)

    def reset(self) -> None:
        """Make all slots greedy."""
        self.asks[:] = 0
        self.penalized[:] = self.biased[:] = False
        self.num_logprobs[:] = -1
        self.num_endless[:] = 0
        self.processed[:] = False

    def update(self, inits: SlotInits) -> None:
        """Set the flags of sequences that get a slot."""
        slots = inits.slots
        self.penalized[slots] = (
            (inits.presence_penalty != 0)
            | (inits.frequency_penalty != 0)
            | (inits.repetition_penalty != 1)
        )
        self.biased[slots] = np.diff(inits.bias_starts) > 0 if len(inits.bias_ids) else False
        self.num_logprobs[slots] = inits.logprobs
        self.num_endless[slots] = (
            np.where(np.diff(inits.end_starts) > 0, inits.num_endless, 0)
            if len(inits.end_ids)
            else 0
        )
        self.processed[slots] = [bool(each) for each in inits.processors] or False
        special = self._is_adjusted(slots) | (self.num_endless[slots] > 0)
        self.asks[slots] = DRAWS * (inits.temperature > 0) + SPECIAL * special
        # Until this block exists, a value that no other slot has.
        self._prefix_ends[:, slots] = -1 - slots

    def note_sampled(self, slots: I32) -> None:
        """Count one token for each of these slots, if some may not end yet. With draft tokens it may get more."""
        endless = slots[self.num_endless[slots] > 0]
        self.num_endless[endless] -= 1
        done = endless[self.num_endless[endless] == 0]
        self.asks[done[~self._is_adjusted(done)]] &= DRAWS

    def _is_adjusted(self, slots: I32) -> Bool:
        is_changed = self.penalized[slots] | self.biased[slots] | self.processed[slots]
        return is_changed | (self.num_logprobs[slots] >= 0)

    def note_blocks(self, deltas: Sequence[BlockDelta]) -> None:
        """Record a step's new blocks, after `update`."""
        for ends, delta in zip(self._prefix_ends, deltas, strict=True):
            at = delta.indices == self._last
            ends[delta.slots[at]] = delta.blocks[at]

    def no_shared_prefix(self, plan: StepPlan) -> bool:
        """Return whether a step's decodes are short and fewer than `SHARING_ROWS` share `SHARED_PREFIX` tokens."""
        num, distance = plan.num_decodes, SHARING_ROWS - 1
        if plan.num_computed_tokens[:num].max(initial=0) >= SHORT:
            return False
        if num < SHARING_ROWS:
            return True
        # Equal values are neighbors once sorted.
        ends = np.sort(self._prefix_ends[:, plan.slots[:num]], axis=1)
        return not (ends[:, distance:] == ends[:, :-distance]).any()

    def asked(self, slots: I32) -> int:
        """Return the bitwise or of the sampling bits of some slots."""
        return int(np.bitwise_or.reduce(self.asks[slots]))


def ragged(starts: I32, index: int) -> slice:
    """Return the slice of sequence `index` in a ragged column."""
    return slice(int(starts[index]), int(starts[index + 1]))


def max_num_blocks(max_model_len: int, block_size: int) -> int:
    """Return the number of block-table entries that the longest sequence needs."""
    return -(-max_model_len // block_size)


def check_supported(plan: StepPlan) -> None:
    """Raise ValueError for features of the step contract that this runner lacks."""
    if len(plan.adapter_ids) and plan.adapter_ids.any():
        raise ValueError("a row uses an adapter, but no adapter is loaded")
