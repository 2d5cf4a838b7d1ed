"""Compiler and matchers on llguidance.

llguidance keeps the lexer states that it has computed per grammar, so the copies of a matcher share them. They also
share a lock: 64 masks took 0.7 ms in one thread and 0.9 to 1.1 ms in 4 to 14 (16 processors of an Intel Xeon).
"""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from tokenspeed_core.api import GrammarError, GrammarKind, Vocabulary
from tokenspeed_grammars_llguidance.source import grammar_source

if TYPE_CHECKING:
    import numpy as np

    I32 = np.ndarray[Any, np.dtype[np.int32]]

MAX_LEXER_STATES = 50_000  # per grammar, 1 to 2 kB each
LEXER_FUEL = 100_000  # for a mask: at most 7 ms
MAX_ITEMS = 50_000  # of the parser, for a mask: at most 2.5 ms
MAX_MESSAGE = 300  # characters
_BASE_BYTES = 2 << 20  # of a compiled grammar with the lexer states of usual outputs
_BYTES_PER_CHAR = 64  # a schema with an enum of 600 kB took 36 MB


class _Tokens:
    """The vocabulary as `LLTokenizer` reads it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = sorted({*vocabulary.special_ids, *vocabulary.eos_ids})
        self.eos_token_id = vocabulary.eos_ids[0]
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the tokens of a text."""
        return self._encode(text if isinstance(text, str) else text.decode(errors="replace"))


class LLGuidance:
    """Compiles grammars for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Index the vocabulary, which takes about 1 s for 150,000 tokens."""
        self._vocabulary = vocabulary
        self._tokenizer = LLTokenizer(_Tokens(vocabulary), eos_token=list(vocabulary.eos_ids))  # type: ignore[arg-type]
        self._limits = LLParserLimits(
            max_lexer_states=MAX_LEXER_STATES,
            step_lexer_fuel=LEXER_FUEL,
            step_max_items=MAX_ITEMS,
            verbose_errors=False,
        )

    def compile(self, kind: GrammarKind, text: str) -> Compiled:
        """Compile a grammar. Raises GrammarError."""
        source = grammar_source(kind, text, self._vocabulary)
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarError(" ".join(matcher.get_error().split())[:MAX_MESSAGE])
        num_bytes = _BASE_BYTES + _BYTES_PER_CHAR * len(source)
        return Compiled(matcher, num_bytes, frozenset(self._vocabulary.eos_ids))


class Compiled:
    """A matcher at the start of a grammar, to copy."""

    def __init__(self, matcher: LLMatcher, num_bytes: int, eos_ids: frozenset[int]) -> None:
        self.num_bytes = num_bytes
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._lock = Lock()

    def matcher(self) -> Matcher:
        """Return a matcher at the start of the grammar."""
        with self._lock:
            return Matcher(self._matcher.deep_copy(), self._eos_ids)


class Matcher:
    """Follows one sequence."""

    def __init__(self, matcher: LLMatcher, eos_ids: frozenset[int]) -> None:
        self.is_terminated = False
        self.matcher = matcher
        self._eos_ids = eos_ids

    def accept(self, token_id: int) -> bool:
        """Advance by a token. Returns False, and keeps the state, if the grammar does not allow it."""
        if self.is_terminated:
            return False
        if token_id in self._eos_ids:
            self.is_terminated = self.matcher.is_accepting()
            return self.is_terminated
        return self.matcher.try_consume_tokens([token_id]) == 1

    def fill(self, row: I32) -> bool:
        """Set the bits of the allowed tokens. Returns False, and allows none, if there are none."""
        if not self.is_terminated and not self.matcher.is_error():
            self.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if not self.matcher.is_error():
                return True
        row[:] = 0
        return False

    def rollback(self, num_tokens: int) -> None:
        """Undo the last accepted tokens."""
        if num_tokens and self.is_terminated:
            self.is_terminated = False
            num_tokens -= 1
        if num_tokens:
            self.matcher.rollback(num_tokens)
