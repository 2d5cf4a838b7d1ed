"""Follows the grammar of one sequence from the end of its reasoning, and fills its masks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

import numpy as np

from tokenspeed_core.api.grammars import CompiledGrammar, Vocabulary
from tokenspeed_core.api.step import I32
from tokenspeed_core.engine.messages import Reasoning


class Phase(Enum):
    """The part of the reply that contains the next token."""

    OPENING = 0  # the first token: it may start the reasoning
    REASONING = 1
    ANSWER = 2  # the grammar applies


class ReasoningTokens:
    """The marks of a model's reasoning as tokens."""

    def __init__(self, marks: Reasoning, vocabulary: Vocabulary) -> None:
        """Find the marks in the vocabulary."""
        self.begin_id = _token_of(marks.begin, vocabulary)
        self.end_id = _token_of(marks.end, vocabulary)
        self.end = marks.end.encode()
        # A mark of several tokens can only be recognized, not offered as an alternative to the answer.
        self.first_phase = Phase.ANSWER if self.begin_id is None else Phase.OPENING
        if marks.is_open:
            self.first_phase = Phase.REASONING
        self.tokens = vocabulary.tokens
        self.mask = np.full(-(-len(vocabulary.tokens) // 32), -1, np.int32)
        _clear(self.mask, vocabulary.eos_ids)


class SequenceGrammar:
    """Follows the output of a sequence. `num_read` counts its tokens."""

    def __init__(
        self,
        compiled: CompiledGrammar,
        reasoning: ReasoningTokens | None = None,
        *,
        min_tokens: int = 0,
        stop_ids: I32 | None = None,
    ) -> None:
        """Start before the first token.

        Before `min_tokens` tokens, `stop_ids` are allowed only where nothing else may come.
        """
        self.compiled = compiled
        self.matcher = compiled.matcher()
        self.num_read = 0
        self.has_failed = False
        self.phase = Phase.ANSWER if reasoning is None else reasoning.first_phase
        self._reasoning = reasoning
        self._tail = b""
        self._min_tokens = min_tokens if stop_ids is not None and len(stop_ids) else 0
        self._stop_ids = stop_ids

    def read(self, token_ids: Iterable[int]) -> None:
        """Advance by the next tokens of the output. Sets `has_failed` if the grammar does not allow one."""
        for token_id in token_ids:
            self.num_read += 1
            is_answer = self.phase is Phase.ANSWER or not self._is_reasoning(token_id)
            if is_answer and not self.matcher.accept(token_id):
                self.has_failed = True

    def fill(self, row: I32) -> None:
        """Set the bits of the tokens that may come next, and clear the others. row int32 [W].

        Sets `has_failed` if the grammar allows no token.
        """
        if self.phase is Phase.REASONING:
            assert self._reasoning is not None
            row[:] = self._reasoning.mask
            return
        if not self.matcher.fill(row):
            self.has_failed = True
        if self.phase is Phase.OPENING or self.num_read < self._min_tokens:
            self._adjust(row)

    def fill_drafts(self, draft_ids: Sequence[int], masks: I32) -> None:
        """Like `fill`, for the next token and for the token after each draft token. masks int32 [1 + drafts, W].

        The state stays that of the output. A draft token that the grammar does not allow is not accepted, so any token
        may follow it. If the grammar fails after a draft token, none may.
        """
        self.fill(masks[0])
        masks[1:] = -1
        before = (self.phase, self._tail, self.num_read, self.has_failed)
        num_accepted = 0
        for draft_id, mask, following in zip(draft_ids, masks, masks[1:], strict=False):
            if self.has_failed or not _is_allowed(mask, draft_id):
                break
            self.num_read += 1
            if self.phase is Phase.ANSWER or not self._is_reasoning(draft_id):
                if not self.matcher.accept(draft_id):
                    break
                num_accepted += 1
            self.fill(following)
        self.matcher.rollback(num_accepted)
        self.phase, self._tail, self.num_read, self.has_failed = before

    def _adjust(self, row: I32) -> None:
        """Apply `min_tokens` to the matcher's mask, and allow the mark that opens the reasoning."""
        reasoning = self._reasoning
        if self.num_read < self._min_tokens:
            assert self._stop_ids is not None
            before = row.copy()
            _clear(row, self._stop_ids)
            if not row.any():
                row[:] = before
        if self.phase is Phase.OPENING:
            assert reasoning is not None
            assert reasoning.begin_id is not None
            words = row.view(np.uint32)
            words[reasoning.begin_id // 32] |= np.uint32(1 << reasoning.begin_id % 32)

    def _is_reasoning(self, token_id: int) -> bool:
        """Return whether a token is part of the reasoning, including its markers."""
        reasoning = self._reasoning
        assert reasoning is not None
        if self.phase is Phase.OPENING:
            is_opened = token_id == reasoning.begin_id
            self.phase = Phase.REASONING if is_opened else Phase.ANSWER
            return is_opened
        if reasoning.end_id is not None:
            is_closed = token_id == reasoning.end_id
        else:
            text = self._tail + reasoning.tokens[token_id]
            is_closed = reasoning.end in text
            self._tail = text[-len(reasoning.end) :]
        if is_closed:
            self.phase = Phase.ANSWER
        return True


def _is_allowed(row: I32, token_id: int) -> bool:
    """Return the bit of a token."""
    return bool(row[token_id // 32] >> token_id % 32 & 1)


def _clear(row: I32, token_ids: Iterable[int]) -> None:
    """Clear the bits of tokens."""
    words = row.view(np.uint32)
    for token_id in token_ids:
        words[token_id // 32] &= np.uint32(~(1 << int(token_id) % 32) & 0xFFFFFFFF)


def _token_of(mark: str, vocabulary: Vocabulary) -> int | None:
    """Return the token that is exactly a mark, None if there is none."""
    if not mark:
        return None
    ids = vocabulary.encode(mark)
    return ids[0] if len(ids) == 1 else None
