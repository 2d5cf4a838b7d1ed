"""The grammar of a sequence: whether it has begun, and its matcher. Sequences with the same grammar run together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import zip_longest

import numpy as np

from tokenspeed_core.api.grammars import CompiledGrammar, Vocabulary
from tokenspeed_core.api.step import I32
from tokenspeed_core.engine.messages import Reasoning


class Phase(Enum):
    """The part of the reply that the next token belongs to."""

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
        # A mark of several tokens can only be recognised, not offered as an alternative to the answer.
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

    def reads(self, token_id: int) -> bool:
        """Count the next token of the output. Returns whether it is the matcher's."""
        self.num_read += 1
        return self.phase is Phase.ANSWER or not self._is_reasoning(token_id)

    @property
    def is_plain(self) -> bool:
        """Whether the matcher alone decides which tokens may come next."""
        return self.phase is Phase.ANSWER and self.num_read >= self._min_tokens

    def adjust(self, row: I32) -> None:
        """Change the matcher's mask, int32 [W], by what else decides. Unused before the reasoning ends."""
        reasoning = self._reasoning
        if self.phase is Phase.REASONING:
            assert reasoning is not None
            row[:] = reasoning.mask
            return
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
        """Return whether a token belongs to the reasoning, its marks included."""
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


def read_tokens(grammars: Sequence[SequenceGrammar], token_ids: Sequence[Sequence[int]]) -> None:
    """Advance sequences with the same compiled grammar by their next tokens, usually one each."""
    for tokens in zip_longest(*token_ids):
        pairs = [
            (grammar, token)
            for grammar, token in zip(grammars, tokens, strict=True)
            if token is not None and grammar.reads(token)
        ]
        if not pairs:
            continue
        matchers = [grammar.matcher for grammar, _ in pairs]
        accepted = grammars[0].compiled.accept(matchers, [token for _, token in pairs])
        if not all(accepted):
            for (grammar, _), is_accepted in zip(pairs, accepted, strict=True):
                grammar.has_failed = grammar.has_failed or not is_accepted


def fill_masks(grammars: Sequence[SequenceGrammar], rows: Sequence[int], mask: I32) -> None:
    """Set the bits of the tokens that may come next in the sequences' rows of the mask, and clear the others.

    `rows` ascend. The sequences have the same compiled grammar.
    """
    pairs = [
        (grammar, row)
        for grammar, row in zip(grammars, rows, strict=True)
        if grammar.phase is not Phase.REASONING
    ]
    if pairs:
        filled = [row for _, row in pairs]
        grammars[0].compiled.fill([grammar.matcher for grammar, _ in pairs], filled, mask)
        is_run = filled[-1] - filled[0] == len(filled) - 1
        part = mask[filled[0] : filled[-1] + 1] if is_run else mask[filled]
        has_bits = np.bitwise_or.reduce(part, axis=1) != 0
        if not has_bits.all():
            for (grammar, _), is_filled in zip(pairs, has_bits.tolist(), strict=True):
                grammar.has_failed = grammar.has_failed or not is_filled
    for grammar, row in zip(grammars, rows, strict=True):
        if not grammar.is_plain:
            grammar.adjust(mask[row])


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
