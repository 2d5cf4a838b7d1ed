"""The contract of grammar backends: they say which tokens may come next. Imports no tensor library.

A backend compiles a grammar once. Each sequence gets a matcher, which follows its tokens and fills one row of a
bitmask per step. The sequences of a grammar are handled in one call per step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from tokenspeed_core.api.parsers import CallTemplate
from tokenspeed_core.targets import load_target

if TYPE_CHECKING:
    from tokenspeed_core.api.step import I32

GrammarKind = Literal["json", "regex", "choice", "ebnf", "calls"]
"""The meaning of a grammar's text: a JSON schema; a regular expression that the whole output matches; a JSON list of
texts; a context-free grammar in GBNF, with the start rule `root`; or the JSON of a `CallGrammar`."""

MAX_GRAMMAR_CHARS = 512 * 1024
MAX_WHITESPACE = 20  # characters in a row between the tokens of JSON
_MARK = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")
ANY_OBJECT = '{"type": "object"}'  # the schema of any JSON object


class GrammarError(ValueError):
    """A grammar that is invalid, or that the backend does not support."""


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The tokens that a grammar chooses from.

    `tokens[i]` are the bytes of token i, empty if it adds no text. Special tokens never match the text of a grammar;
    only a `CallGrammar` names them, by their content. End-of-sequence tokens are allowed where the grammar may end.
    """

    tokens: Sequence[bytes]
    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]  # at least one
    encode: Callable[[str], list[int]]

    def parts(self, text: str) -> list[str | int]:
        """Split a text at special tokens, and replace these by their ids."""
        ids = {self.tokens[i].decode(): i for i in self.special_ids if self.tokens[i]}
        if not ids or not text:
            return [text] if text else []
        longest_first = sorted(ids, key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
        return [ids.get(piece, piece) for piece in pieces if piece]


@dataclass(frozen=True, slots=True)
class CallFunction:
    """A function that a model may call, and the JSON schema of its arguments."""

    name: str
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """The output of a model that calls functions.

    With `is_required`, the output is calls and nothing else, or JSON that fits `answer`, if that is set. Otherwise it
    is any text, in which the `trigger` starts a call.
    """

    template: CallTemplate
    functions: tuple[CallFunction, ...]
    is_parallel: bool = True  # more than one call is allowed
    is_required: bool = True
    answer: Mapping[str, Any] | None = None  # a JSON schema

    def for_vocabulary(self, vocabulary: Vocabulary) -> CallGrammar:
        """Return the grammar without the end-of-sequence tokens of its template.

        If a call ends with such a token, the output ends after one call.
        """
        ends = [vocabulary.tokens[i].decode() for i in vocabulary.eos_ids]
        template, has_end = self.template, False
        for end in filter(None, ends):
            has_end = has_end or end in template.call_end
            template = CallTemplate(
                **{name: text.replace(end, "") for name, text in asdict(template).items()}
            )
        return replace(self, template=template, is_parallel=self.is_parallel and not has_end)

    @property
    def trigger(self) -> str:
        """The marker at the start of calls, such as <tool_call>; empty if calls have no marker."""
        found = _MARK.match(self.template.begin + self.template.call_begin)
        return found[0] if found else ""

    @property
    def text(self) -> str:
        """The grammar as the text of the kind "calls"."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> CallGrammar:
        """Parse the result of `text`."""
        value = json.loads(text)
        return cls(
            CallTemplate(**value["template"]),
            tuple(CallFunction(**each) for each in value["functions"]),
            value["is_parallel"],
            value["is_required"],
            value["answer"],
        )


class GrammarMatcher(Protocol):
    """Follows the tokens of one sequence. Used by one thread at a time."""

    @property
    def is_terminated(self) -> bool:
        """Whether an end-of-sequence token was accepted."""

    def accept(self, token_id: int) -> bool:
        """Advance by a token. Returns False, and keeps the state, if the grammar does not allow it."""

    def fill(self, row: I32) -> bool:
        """Set bit `i % 32` of word `i // 32` for each allowed token i, and clear all other bits.

        row int32 [W], contiguous, W = ceil(V / 32). Returns False if no token is allowed: the matcher failed.
        """

    def rollback(self, num_tokens: int) -> None:
        """Undo the last accepted tokens, for draft tokens that were rejected."""


class CompiledGrammar(Protocol):
    """A grammar that is ready to match. Thread-safe."""

    @property
    def num_bytes(self) -> int:
        """Estimated size in memory."""

    def matcher(self) -> GrammarMatcher:
        """Return a matcher at the start of the grammar."""


@runtime_checkable
class GrammarCompiler(Protocol):
    """Compiles grammars for one vocabulary. Thread-safe."""

    def compile(self, kind: GrammarKind, text: str) -> CompiledGrammar:
        """Compile a grammar. Raises GrammarError.

        The caller limits time and memory: it compiles every grammar in a subprocess first.
        """


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar backend, registered in `tokenspeed.grammars`.

    With `bounds_time`, a call of a matcher fails if it needs more than about 10 ms, and the engine's thread calls it
    directly. Other matchers are called in a separate thread, which the engine can abandon; they must not hold the GIL
    for long. The two thread switches cost each step 0.1 to 0.2 ms.
    """

    load: str  # "module:factory"; `factory(vocabulary: Vocabulary)` returns a GrammarCompiler
    bounds_time: bool = False

    def make(self, vocabulary: Vocabulary) -> GrammarCompiler:
        """Return a compiler. Raises ImportError, AttributeError, or the factory's exception."""
        compiler: GrammarCompiler = load_target(self.load)(vocabulary)
        return compiler


@dataclass(frozen=True, slots=True)
class GrammarRanking:
    """The measured order of grammar backends, the fastest first, in an entry of `tokenspeed.rankings`.

    `figures` are pairs of a backend and a description of its measurement.
    """

    figures: tuple[tuple[str, str], ...]
