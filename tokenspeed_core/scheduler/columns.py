"""The running sequences as NumPy columns, indexed by slot: what a step costs must not depend on Python objects."""

from __future__ import annotations

import numpy as np

from tokenspeed_core.api.step import I32
from tokenspeed_core.scheduler.sequence import Sequence

NOBODY = -1


class SlotColumns:
    """One entry per slot. Lengths are in tokens."""

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        """Make empty columns. The token matrix is untouched memory until used."""
        self.sequence_id = np.full(max_num_seqs, NOBODY, np.int64)
        self.num_known = np.zeros(
            max_num_seqs, np.int32
        )  # prompt and output that the host has seen
        self.num_bound = np.zeros(
            max_num_seqs, np.int32
        )  # the most of them once all steps in flight are over
        self.num_planned = np.zeros(
            max_num_seqs, np.int32
        )  # known ones whose cache entries are computed or planned
        self.target = np.zeros(
            max_num_seqs, np.int32
        )  # known ones when the slot was taken, all to come by chunks
        self.max_len = np.zeros(max_num_seqs, np.int32)  # at which the sequence ends
        self.capacity = np.zeros(max_num_seqs, np.int32)  # that its blocks hold
        self.num_hashed_tokens = np.zeros(max_num_seqs, np.int32)  # whose blocks others may find
        self.priority = np.zeros(max_num_seqs, np.int32)
        self.arrival = np.zeros(max_num_seqs, np.int64)  # its place in the order of arrival
        self.last_step = np.zeros(max_num_seqs, np.int64)  # that it was part of
        self.num_cached = np.zeros(max_num_seqs, np.int32)  # to be reported with the first token
        self.is_decoding = np.zeros(max_num_seqs, np.bool_)
        self.stop_ids = np.full(
            (max_num_seqs, 1), -1, np.int32
        )  # filled up with -1, as many as the most that one has
        self.tokens = np.empty((max_num_seqs, max_model_len + 1), np.int32)
        self._decoding: I32 | None = None
        self._prefilling: I32 | None = None

    def occupy(self, slot: int, sequence: Sequence, num_hit: int, capacity: int) -> None:
        """Fill a slot's entries for a sequence that resumes at `num_hit`."""
        known = len(sequence.tokens)
        self.sequence_id[slot] = sequence.sequence_id
        self.tokens[slot, :known] = sequence.tokens
        self.num_known[slot] = self.num_bound[slot] = self.target[slot] = known
        self.num_planned[slot] = self.num_hashed_tokens[slot] = num_hit
        self.capacity[slot] = capacity
        self.max_len[slot] = sequence.max_len
        self.priority[slot] = sequence.request.priority
        self.arrival[slot] = sequence.arrival
        if sequence.num_cached < 0:
            sequence.num_cached = num_hit
        self.num_cached[slot] = sequence.num_cached if known == sequence.num_prompt else 0
        self._set_stop_ids(slot, sequence.request.stop_token_ids)
        self.set_decoding(slot, False)

    def vacate(self, slot: int, sequence: Sequence) -> None:
        """Empty a slot and bring its sequence's tokens up to date."""
        sequence.tokens = self.tokens[slot, : self.num_known[slot]].copy()
        sequence.last_step = int(self.last_step[slot])
        self.sequence_id[slot] = NOBODY
        self.set_decoding(slot, False)

    def set_decoding(self, slot: int, decoding: bool) -> None:
        """Move a slot between the decoding and the prefilling ones."""
        self.is_decoding[slot] = decoding
        self._decoding = self._prefilling = None

    def decoding(self) -> I32:
        """Return the slots that decode, ascending."""
        if self._decoding is None:
            self._decoding = np.flatnonzero(self.is_decoding).astype(np.int32)
        return self._decoding

    @property
    def has_decodes(self) -> bool:
        """Whether a sequence will decode again: one whose last token is on its way will not."""
        slots = self.decoding()
        return bool((self.max_len[slots] > self.num_bound[slots]).any())

    def prefilling(self) -> I32:
        """Return the slots that prefill, in order of arrival."""
        if self._prefilling is None:
            slots = np.flatnonzero((self.sequence_id != NOBODY) & ~self.is_decoding).astype(
                np.int32
            )
            self._prefilling = slots[np.argsort(self.arrival[slots], kind="stable")]
        return self._prefilling

    def known(self, slot: int) -> I32:
        """Return a view of the tokens that a slot's sequence is known to have."""
        return self.tokens[slot, : self.num_known[slot]]

    def _set_stop_ids(self, slot: int, ids: I32) -> None:
        if len(ids) > self.stop_ids.shape[1]:
            wider = np.full((len(self.stop_ids), len(ids)), -1, np.int32)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(ids)] = ids
