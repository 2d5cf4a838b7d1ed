"""The running sequences as NumPy columns, indexed by slot. A decode step reads them without a Python loop."""

from __future__ import annotations

import numpy as np

from tokenspeed_core.api.step import I32, I64
from tokenspeed_core.scheduler.sequence import Sequence

VACANT = -1


class SlotColumns:
    """One entry per slot. Lengths are in tokens.

    A token is known when the host has seen it; up to `num_bound - num_known` more may come from steps in flight. Slots
    are int64: NumPy takes five times as long to index with int32.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        """Allocate the columns of vacant slots."""
        self.sequence_id = np.full(max_num_seqs, VACANT, np.int64)
        # Prompt and output tokens that the host has seen.
        self.num_known = np.zeros(max_num_seqs, np.int32)
        # Upper bound of num_known once all steps in flight finished.
        self.num_bound = np.zeros(max_num_seqs, np.int32)
        # Known tokens whose KV cache entries are computed or planned.
        self.num_planned = np.zeros(max_num_seqs, np.int32)
        # Known tokens when the slot was taken: chunks compute them.
        self.target = np.zeros(max_num_seqs, np.int32)
        # Length at which the sequence ends.
        self.max_len = np.zeros(max_num_seqs, np.int32)
        # Tokens of the prefix hit with which the slot was taken.
        self.resumed = np.zeros(max_num_seqs, np.int32)
        # Tokens that the sequence's blocks can hold.
        self.capacity = np.zeros(max_num_seqs, np.int32)
        # Tokens in blocks that the prefix index lists.
        self.num_hashed_tokens = np.zeros(max_num_seqs, np.int32)
        self.priority = np.zeros(max_num_seqs, np.int32)
        self.arrival = np.zeros(max_num_seqs, np.int64)
        # Id of the last step that the sequence was planned in.
        self.last_step = np.zeros(max_num_seqs, np.int64)
        # Cached prompt tokens, reported with the first output token.
        self.num_cached = np.zeros(max_num_seqs, np.int32)
        self.has_grammar = np.zeros(max_num_seqs, np.bool_)
        self.num_grammars = 0  # slots that have one
        # Logits processors are called once for each new token, so their rows get no draft tokens.
        self.may_draft = np.zeros(max_num_seqs, np.bool_)
        self.is_decoding = np.zeros(max_num_seqs, np.bool_)
        # Padded with -1; as wide as the longest list of any sequence so far.
        self.stop_ids = np.full((max_num_seqs, 1), -1, np.int32)
        # Not initialized: the host commits memory only for rows that are written.
        self.tokens = np.empty((max_num_seqs, max_model_len + 1), np.int32)
        self._decoding: I64 | None = None
        self._prefilling: I64 | None = None

    def occupy(self, slot: int, sequence: Sequence, num_cached: int, capacity: int) -> None:
        """Fill the entries of a slot for a sequence whose first `num_cached` tokens are computed."""
        num_known = len(sequence.tokens)
        self.sequence_id[slot] = sequence.sequence_id
        self.tokens[slot, :num_known] = sequence.tokens
        self.num_known[slot] = num_known
        self.num_bound[slot] = num_known
        self.target[slot] = num_known
        self.num_planned[slot] = num_cached
        self.num_hashed_tokens[slot] = num_cached
        self.resumed[slot] = num_cached
        self.capacity[slot] = capacity
        self.max_len[slot] = sequence.max_len
        self.priority[slot] = sequence.request.priority
        self.arrival[slot] = sequence.arrival
        if sequence.num_cached < 0:
            sequence.num_cached = num_cached
        self.num_cached[slot] = sequence.num_cached if num_known == sequence.num_prompt else 0
        self._set_stop_ids(slot, sequence.request.stop_token_ids)
        self.last_step[slot] = 0
        self._set_grammar(slot, sequence.grammar is not None)
        self.may_draft[slot] = not sequence.request.processors
        self.set_decoding(slot, False)

    def vacate(self, slot: int, sequence: Sequence) -> None:
        """Empty a slot and copy its known tokens to the sequence."""
        sequence.tokens = self.known(slot).copy()
        sequence.last_step = int(self.last_step[slot])
        self.sequence_id[slot] = VACANT
        self._set_grammar(slot, False)
        self.set_decoding(slot, False)

    def set_decoding(self, slot: int, is_decoding: bool) -> None:
        """Record whether the sequence in a slot decodes or prefills."""
        self.is_decoding[slot] = is_decoding
        self._decoding = None
        self._prefilling = None

    def decoding(self) -> I64:
        """Return the slots that decode, ascending."""
        if self._decoding is None:
            self._decoding = np.flatnonzero(self.is_decoding)
        return self._decoding

    def prefilling(self) -> I64:
        """Return the slots that prefill, in order of arrival."""
        if self._prefilling is None:
            is_prefilling = (self.sequence_id != VACANT) & ~self.is_decoding
            slots = np.flatnonzero(is_prefilling)
            self._prefilling = slots[np.argsort(self.arrival[slots], kind="stable")]
        return self._prefilling

    @property
    def has_decodes(self) -> bool:
        """Whether any sequence needs another decode step, except sequences whose last token is in flight."""
        slots = self.decoding()
        return bool(np.count_nonzero(self.max_len[slots] > self.num_bound[slots]))

    def known(self, slot: int) -> I32:
        """Return a view of the known tokens of the sequence in a slot."""
        return self.tokens[slot, : self.num_known[slot]]

    def _set_grammar(self, slot: int, has_grammar: bool) -> None:
        self.num_grammars += has_grammar - int(self.has_grammar[slot])
        self.has_grammar[slot] = has_grammar

    def _set_stop_ids(self, slot: int, ids: I32) -> None:
        width = self.stop_ids.shape[1]
        if len(ids) > width:
            wider = np.full((len(self.stop_ids), len(ids)), -1, np.int32)
            wider[:, :width] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(ids)] = ids
