"""Draft tokens that a draft model makes on the device after a step, for the next step."""

from __future__ import annotations

import numpy as np

from tokenspeed_core.api.step import I32, I64
from tokenspeed_core.scheduler.columns import SlotColumns
from tokenspeed_core.scheduler.drafts import DraftDepth, DraftSource, NextDraftCount
from tokenspeed_core.scheduler.limits import SchedulerLimits


class ModelDrafts(DraftSource):
    """Counts the draft tokens that the device has for each slot.

    Their ids stay there, unless a row has a grammar: its masks depend on them, so the host gets the ids of all rows.

    `DraftDepth` decides how many are made: as many as the next step verifies. While that number is 0, the draft model
    runs only after steps with prompt tokens, if at all, and does not slow down decode steps.

    A sequence gets draft tokens only if the draft model followed all of its chunks. Two gaps in the draft model's cache
    are allowed, because they are not worth tracking: tokens that were decoded while it did not run, and prefix hits on
    blocks that it did not follow. There the cache holds zeros or old values. Draft tokens are then worse, but
    verification keeps outputs exact.
    """

    has_model = True

    def __init__(self, depth: DraftDepth, limits: SchedulerLimits, columns: SlotColumns) -> None:
        """Start without draft tokens."""
        super().__init__(depth, limits, columns)
        self._num_made = np.zeros(limits.max_num_seqs, np.int32)
        self._is_known = np.zeros(limits.max_num_seqs, np.bool_)  # the host has the ids
        self._has_made = False  # of any slot, since the last pause
        self._is_followed = np.ones(limits.max_num_seqs, np.bool_)  # so far, all chunks were

    @property
    def is_idle(self) -> bool:
        """Whether drafting is paused, and no row has draft tokens left."""
        return self._depth.is_paused and not self._has_made

    def wants_results(self) -> bool:
        """Return whether a row has draft tokens. The newest acceptance decides how many are verified."""
        slots = self._columns.decoding()
        return bool(self._num_made[slots].any() and self._columns.may_draft[slots].any())

    def count(self, slots: I64, room: I32) -> I32 | None:
        """Return the number of draft tokens that each row has, at most `room`."""
        max_drafts = self._depth.max_drafts(len(slots))
        if not max_drafts:
            return None
        counts = np.minimum(self._num_made[slots], np.minimum(room, np.int32(max_drafts)))
        has_grammar = self._columns.has_grammar[slots]
        if self._columns.num_grammars:
            counts[has_grammar & ~self._is_known[slots]] = 0
            if counts[has_grammar].any():  # then the plan holds the ids of all rows
                counts[~self._is_known[slots]] = 0
        if not counts.any():
            return None
        left = self._num_left(len(slots))
        kept: I32 = np.clip(left - (np.cumsum(counts) - counts), 0, counts).astype(np.int32)
        return kept

    def take(self, slots: I64, counts: I32) -> I32 | None:
        """Return the first `counts[i]` draft tokens of each row if a grammar needs them; None: the device has them."""
        needs_ids = counts[self._columns.has_grammar[slots]].any()
        return super().take(slots, counts) if needs_ids else None

    def next_drafts(
        self, slots: I64, chunk_slots: I64, *, is_useful: bool = True
    ) -> NextDraftCount | None:
        """Return how many draft tokens a step makes for each row that samples in it; None: the model does not run."""
        has_prompts = len(chunk_slots) > 0
        is_followed = not has_prompts or self._depth.follows_prompts(self._longest(chunk_slots))
        none = NextDraftCount(0) if has_prompts and is_followed else None
        if not is_followed:
            self._is_followed[chunk_slots] = False
        if self._depth.is_paused or not is_followed:
            self._num_made[:] = 0
            self._is_known[:] = False
            self._has_made = False
            return none
        self._num_made[slots] = 0
        self._is_known[slots] = False
        if not is_useful or not self._depth.max_drafts(len(slots)):
            return none
        places = np.flatnonzero(self._columns.may_draft[slots] & self._is_followed[slots])
        if not len(places):
            return none
        drafting = slots[places]
        most = np.full(len(places), self._limits.max_drafts, np.int32)
        wanted = self._depth.choose(drafting, most, None, len(slots), self._num_left(len(slots)))
        self._num_made[drafting] = wanted
        self._has_made = True
        returns_ids = bool(wanted[self._columns.has_grammar[drafting]].any())
        return NextDraftCount(int(wanted.max()), returns_ids)

    def _longest(self, slots: I64) -> int:
        """Return the tokens of the longest prompt in some slots, without its prefix hit."""
        columns = self._columns
        return int((columns.target[slots] - columns.resumed[slots]).max())

    def receive(self, slots: I64, token_ids: I32) -> None:
        """Keep the ids of the draft tokens that the device made in the newest step."""
        self._ids[slots, : token_ids.shape[1]] = token_ids
        self._is_known[slots] = True

    def end(self, slot: int) -> None:
        """Discard the state of the sequence in a slot."""
        self._num_made[slot] = 0
        self._is_followed[slot] = True
        self._depth.begin(slot)
