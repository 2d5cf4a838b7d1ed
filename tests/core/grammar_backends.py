"""Grammar backends without a library, for tests. `SPEC` is loaded by the subprocess that tries grammars too."""

from __future__ import annotations

import os
import time

from tokenspeed_core.api.grammars import (
    GrammarError,
    GrammarKind,
    GrammarSpec,
    Vocabulary,
)
from tokenspeed_core.api.step import I32

VOCAB_SIZE = 64
EOS = 17
VOCABULARY = Vocabulary(
    tuple(bytes([48 + i]) for i in range(VOCAB_SIZE)),
    frozenset({EOS}),
    (EOS,),
    lambda text: [byte - 48 for byte in text.encode()],
)


def allowed(num_accepted: int, token: int) -> bool:
    """Whether a token may be the output's next one. The end is allowed after five tokens."""
    return num_accepted >= 5 if token == EOS else (num_accepted + token) % 3 != 0


class CountingMatcher:
    """A grammar that depends on the number of accepted tokens."""

    def __init__(self, on_fill: str) -> None:
        self.num_accepted = 0
        self.is_terminated = False
        self._on_fill = on_fill

    def accept(self, token_id: int) -> bool:
        if self.is_terminated or not allowed(self.num_accepted, token_id):
            return False
        self.num_accepted += 1
        self.is_terminated = token_id == EOS
        return True

    def fill(self, row: I32) -> bool:
        row[:] = 0
        if self._on_fill == "slow":
            _be_slow(self, 0.3)
        if self._on_fill == "5 ms":
            _be_slow(self, 0.005)
        if self._on_fill == "failing" and self.num_accepted == 2:
            return False
        for token in range(VOCAB_SIZE):
            if allowed(self.num_accepted, token):
                row[token // 32 : token // 32 + 1].view("uint32")[0] |= 1 << token % 32
        return bool(row.any())

    def rollback(self, num_tokens: int) -> None:
        self.num_accepted -= num_tokens
        self.is_terminated = False


class Counting:
    """A compiled grammar."""

    num_bytes = 1000

    def __init__(self, on_fill: str) -> None:
        self._on_fill = on_fill

    def matcher(self) -> CountingMatcher:
        return CountingMatcher(self._on_fill)


def _be_slow(matcher: CountingMatcher, seconds: float) -> None:
    end = time.thread_time() + seconds
    while matcher.num_accepted == 2 and time.thread_time() < end:
        pass


class Compiler:
    """Compiles texts that name a behavior to simulate."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def compile(self, kind: GrammarKind, text: str) -> Counting:
        what = text.partition(" ")[0]
        match what:
            case "invalid":
                raise GrammarError("it says so")
            case "endless":
                while True:
                    pass
            case "huge":
                bytearray(8 << 30)
            case "crash":
                os.abort()
        return Counting(what)


SPEC = GrammarSpec("grammar_backends:Compiler")
