"""Compiler and matchers on XGrammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import xgrammar

from tokenspeed_core.api import (
    MAX_WHITESPACE,
    CallGrammar,
    GrammarError,
    GrammarKind,
    Vocabulary,
)
from tokenspeed_grammars_xgrammar.calls import structural_tag
from tokenspeed_grammars_xgrammar.schema import check_schema

I32 = np.ndarray[Any, np.dtype[np.int32]]
MAX_MESSAGE = 300  # characters
_CONTROL = re.compile(rb"[\x00-\x09\x0b-\x1f]")  # all but the newline


class XGrammar:
    """Compiles grammars for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Index the vocabulary, which takes about 1 s for 150,000 tokens."""
        self._vocabulary = vocabulary
        # No UTF-8 has this byte, so special tokens match no text, but can be named.
        tokens = [
            b"\xff" + token if i in vocabulary.special_ids else token
            for i, token in enumerate(vocabulary.tokens)
        ]
        info = xgrammar.TokenizerInfo(
            tokens,
            xgrammar.VocabType.RAW,
            vocab_size=len(tokens),
            stop_token_ids=list(vocabulary.eos_ids),
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._all = _mask_without(len(tokens), ())
        # XGrammar lets strings with a length have control characters, which JSON forbids.
        controls = (i for i, token in enumerate(vocabulary.tokens) if _CONTROL.search(token))
        self._without_controls = _mask_without(len(tokens), controls)

    def compile(self, kind: GrammarKind, text: str) -> Compiled:
        """Compile a grammar. Raises GrammarError."""
        try:
            allowed = self._without_controls if kind in ("json", "calls") else self._all
            return Compiled(self._compile(kind, text), allowed)
        except GrammarError:
            raise
        except Exception as error:  # the library raises RuntimeError and others
            raise GrammarError(_short(error)) from error

    def _compile(self, kind: GrammarKind, text: str) -> xgrammar.CompiledGrammar:
        compiler = self._compiler
        match kind:
            case "json":
                schema = json.loads(text)
                check_schema(schema)
                return compiler.compile_json_schema(
                    json.dumps(schema), strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE
                )
            case "regex":
                return compiler.compile_regex(text)
            case "choice":
                choices = [json.dumps(each, ensure_ascii=False) for each in json.loads(text)]
                return compiler.compile_grammar(f"root ::= {' | '.join(choices)}\n")
            case "ebnf":
                return compiler.compile_grammar(text)
            case "calls":
                grammar = CallGrammar.read(text).for_vocabulary(self._vocabulary)
                return compiler.compile_structural_tag(structural_tag(grammar, self._vocabulary))
        raise GrammarError(f"XGrammar does not support grammars of the kind {kind!r}")


class Compiled:
    """A compiled grammar."""

    def __init__(self, grammar: xgrammar.CompiledGrammar, allowed: I32) -> None:
        self._allowed = allowed
        self.num_bytes = max(1, grammar.memory_size_bytes)
        self._grammar = grammar

    def matcher(self) -> Matcher:
        """Return a matcher at the start of the grammar."""
        return Matcher(xgrammar.GrammarMatcher(self._grammar), self._allowed)


class Matcher:
    """Follows a sequence. Only the tokens of the mask `allowed` may occur in it."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, allowed: I32) -> None:
        self._allowed = allowed
        self.matcher = matcher

    @property
    def is_terminated(self) -> bool:
        """Whether an end-of-sequence token was accepted."""
        return self.matcher.is_terminated()

    def accept(self, token_id: int) -> bool:
        """Advance by a token. Returns False, and keeps the state, if the grammar does not allow it."""
        is_allowed = self._allowed[token_id // 32] >> token_id % 32 & 1
        return bool(
            is_allowed and not self.matcher.is_terminated() and self.matcher.accept_token(token_id)
        )

    def fill(self, row: I32) -> bool:
        """Set the bits of the allowed tokens. Returns whether there are any."""
        if self.matcher.is_terminated():
            row[:] = 0
            return False
        self.matcher.fill_next_token_bitmask(row.reshape(1, -1))
        row &= self._allowed
        return bool(row.any())

    def rollback(self, num_tokens: int) -> None:
        """Undo the last accepted tokens."""
        if num_tokens:
            self.matcher.rollback(num_tokens)


def _mask_without(vocab_size: int, token_ids: Iterable[int]) -> I32:
    """Return a mask of all tokens but some."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[:vocab_size] = 1
    bits[list(token_ids)] = 0
    return np.packbits(bits, bitorder="little").view(np.int32)


def _short(error: Exception) -> str:
    """Return the message without the time and the place in the library's source."""
    text = re.sub(r"^(\[[\d:]+\] )?\S+\.cc:\d+: ", "", " ".join(str(error).split()))
    return text[:MAX_MESSAGE] or type(error).__name__
