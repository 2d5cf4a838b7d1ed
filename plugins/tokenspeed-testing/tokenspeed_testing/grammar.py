"""Conformance of a grammar backend, as a class to inherit. It walks through grammars at random.

Subclasses set `spec = MINE`.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np

from tokenspeed_core.api.grammars import (
    CallFunction,
    CallGrammar,
    CompiledGrammar,
    GrammarCompiler,
    GrammarError,
    GrammarKind,
    GrammarMatcher,
    GrammarSpec,
    Vocabulary,
)
from tokenspeed_core.api.parsers import CallTemplate
from tokenspeed_core.api.step import I32

NUM_WALKS = 12
MAX_STEPS = 300  # of a walk; a walk that is longer is not checked at its end
EOS, EOT, MARK = 256, 257, 258
_WORDS = ('{"', '":', '", "', '"}', "true", "12", "an", " the", "日本", "ab", "Paris", "\n  ", "]}")
TOKENS = (
    *(bytes([byte]) for byte in range(256)),
    b"<|end|>",
    b"<|turn|>",
    b"<|call|>",
    *(word.encode() for word in _WORDS),
    *[b""] * 7,
)
VOCABULARY = Vocabulary(
    TOKENS, frozenset({EOS, EOT, MARK}), (EOS, EOT), lambda text: [*text.encode()]
)
NUM_WORDS = -(-len(TOKENS) // 32)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "units": {"enum": ["metric", "imperial"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["city", "days", "units", "tags"],
    "additionalProperties": False,
}
TAGGED = CallTemplate('<tool_call>{"name": "', '", "arguments": ', "}</tool_call>", separator="\n")
MARKED = CallTemplate("<|call|>", " ", "<|call|>", begin="[", end="]")


def is_forecast(text: str) -> bool:
    """Return whether a text is an object of `SCHEMA`."""
    value = json.loads(text)
    return (
        list(value) == ["city", "days", "units", "tags"]
        and isinstance(value["city"], str)
        and value["days"] in range(1, 10)
        and value["units"] in ("metric", "imperial")
        and len(value["tags"]) <= 2
        and all(isinstance(tag, bool) for tag in value["tags"])
    )


def is_object(text: str) -> bool:
    """Return whether a text is a JSON object."""
    return isinstance(json.loads(text), dict)


@dataclass(frozen=True, slots=True)
class Case:
    """A grammar, and whether it accepts a text."""

    kind: GrammarKind
    text: str
    accepts: Callable[[str], Any]


CASES = (
    Case("json", json.dumps(SCHEMA), is_forecast),
    Case("json", '{"type": "object"}', is_object),
    Case("regex", r"[0-9]{3}-(an|the)+", re.compile(r"[0-9]{3}-(an|the)+").fullmatch),
    Case("regex", r"\d+(\.\d+)?", re.compile(r"\d+(\.\d+)?").fullmatch),
    Case("choice", json.dumps(["yes", "no", 'Pari"s']), ["yes", "no", 'Pari"s'].__contains__),
    Case(
        "ebnf",
        'root ::= "a" digit+ ("x" | "y")*\ndigit ::= [0-9]',
        re.compile("a[0-9]+[xy]*").fullmatch,
    ),
)
INVALID: tuple[tuple[GrammarKind, str], ...] = (
    ("json", "{"),
    ("json", '{"type": "no such type"}'),
    ("json", '{"$ref": "http://127.0.0.1:1/schema.json"}'),
    ("regex", "(a"),
    ("ebnf", "root ::= missing"),
)


def masked(matcher: GrammarMatcher) -> list[int]:
    """Return the tokens that a matcher allows. The row is poisoned before."""
    row = np.full(NUM_WORDS, 0x5A5A5A5A, np.int32)
    has_any = matcher.fill(row)
    found = _ids(row)
    assert has_any == bool(found), "`fill` returns whether a token is allowed"
    return found


def _ids(row: I32) -> list[int]:
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def walk(matcher: GrammarMatcher, chance: random.Random, max_steps: int = MAX_STEPS) -> list[int]:
    """Accept random allowed tokens until the end, or `max_steps` of them. Short tokens and the end are preferred."""
    tokens: list[int] = []
    while not matcher.is_terminated and len(tokens) < max_steps:
        allowed = masked(matcher)
        assert allowed, f"no token is allowed after {text_of(tokens)!r}"
        closing = [
            i for i in allowed if TOKENS[i] in (b'"', b"}", b"]", b"9", b"<|call|>") or i == EOS
        ]
        token = chance.choice(closing if closing and chance.random() < 0.5 else allowed)
        assert matcher.accept(token), f"{TOKENS[token]!r} is in the mask after {text_of(tokens)!r}"
        tokens.append(token)
    return tokens


def text_of(tokens: Sequence[int]) -> str:
    """Return the text of tokens without end-of-sequence tokens."""
    return b"".join(TOKENS[i] for i in tokens if i not in (EOS, EOT)).decode(errors="replace")


class GrammarConformance:
    """Checks of a grammar backend."""

    spec: ClassVar[GrammarSpec]

    @classmethod
    def compiler(cls) -> GrammarCompiler:
        """Return the backend's compiler for the kit's vocabulary."""
        return _compiler(cls.spec)

    def compiled(self, kind: GrammarKind, text: str) -> CompiledGrammar:
        """Return a compiled grammar."""
        return self.compiler().compile(kind, text)

    def test_every_walk_is_accepted(self) -> None:
        """Whatever is chosen, a finished text fits the grammar."""
        num_finished = 0
        for case in CASES:
            compiled = self.compiled(case.kind, case.text)
            assert compiled.num_bytes > 0
            for seed in range(NUM_WALKS):
                matcher = compiled.matcher()
                text = text_of(walk(matcher, random.Random(seed)))
                if matcher.is_terminated:
                    num_finished += 1
                    assert case.accepts(text), f"{text!r} does not fit {case.kind} {case.text}"
        assert num_finished > NUM_WALKS * len(CASES) // 2

    def test_mask_agrees_with_accept(self) -> None:
        """A token is accepted exactly if its bit is set. A refused token changes nothing."""
        for case in CASES:
            matcher, chance = self.compiled(case.kind, case.text).matcher(), random.Random(3)
            for _ in range(6):
                allowed = masked(matcher)
                for token in range(len(TOKENS)):
                    is_accepted = matcher.accept(token)
                    assert is_accepted == (token in allowed), f"{TOKENS[token]!r} in {case.text}"
                    if is_accepted:
                        matcher.rollback(1)
                assert masked(matcher) == allowed, f"a token or its rollback changed {case.text}"
                if set(allowed) <= {EOS, EOT}:
                    break
                assert matcher.accept(chance.choice([i for i in allowed if i not in (EOS, EOT)]))

    def test_end_is_allowed_where_the_grammar_may_end(self) -> None:
        """Every end-of-sequence token is allowed at the end and nowhere else."""
        matcher = self.compiled("regex", "ab?").matcher()
        assert masked(matcher) == [ord("a"), TOKENS.index(b"ab")]
        assert not matcher.accept(EOS)
        assert matcher.accept(ord("a"))
        assert masked(matcher) == [ord("b"), EOS, EOT]
        assert matcher.accept(ord("b"))
        assert masked(matcher) == [EOS, EOT]
        assert not matcher.is_terminated
        assert matcher.accept(EOT) and matcher.is_terminated
        assert not matcher.accept(ord("a"))

    def test_rollback_restores_the_state(self) -> None:
        """After a rollback of any number of tokens, the end included, the masks are as before."""
        for case in CASES:
            compiled = self.compiled(case.kind, case.text)
            matcher = compiled.matcher()
            tokens = walk(matcher, random.Random(5), 40)
            for num in range(1, len(tokens) + 1):
                matcher.rollback(num)
                fresh = compiled.matcher()
                assert all(fresh.accept(token) for token in tokens[: len(tokens) - num])
                assert masked(matcher) == masked(fresh), f"{num} of {len(tokens)} in {case.text}"
                assert all(matcher.accept(token) for token in tokens[len(tokens) - num :])

    def test_matchers_are_independent(self) -> None:
        """Matchers of one grammar do not share their position."""
        compiled = self.compiled("regex", "[ab]c")
        one, other = compiled.matcher(), compiled.matcher()
        before = masked(other)
        assert one.accept(ord("a"))
        assert masked(other) == before
        assert masked(compiled.matcher()) == before

    def test_special_and_empty_tokens_are_no_text(self) -> None:
        """A grammar of any text allows neither special tokens nor tokens without text."""
        for kind, text in (("regex", "(.|\\n)+"), ("json", '{"type": "string"}')):
            matcher = self.compiled(kind, text).matcher()  # type: ignore[arg-type]
            if kind == "json":
                assert matcher.accept(ord('"'))
            allowed = set(masked(matcher))
            assert ord("x") in allowed
            assert not allowed & {EOS, EOT, MARK}
            assert all(TOKENS[i] for i in allowed)

    def test_invalid_grammars_are_refused(self) -> None:
        """An invalid or unsupported grammar raises GrammarError and nothing else."""
        for kind, text in INVALID:
            assert self._refusal(kind, text), f"{kind} {text!r} was compiled"

    def test_forced_calls_fit_the_template(self) -> None:
        """Required calls are in the template's text, with arguments that fit their schemas."""
        for template, is_parallel in ((TAGGED, True), (TAGGED, False), (MARKED, True)):
            functions = (CallFunction("forecast", SCHEMA), CallFunction("now", {"type": "object"}))
            grammar = CallGrammar(template, functions, is_parallel)
            compiled = self.compiled("calls", grammar.text)
            num_finished = 0
            for seed in range(NUM_WALKS):
                matcher = compiled.matcher()
                text = text_of(walk(matcher, random.Random(seed)))
                if matcher.is_terminated:
                    num_finished += 1
                    self._check_calls(text, template, is_parallel)
            assert num_finished

    def test_marks_of_calls_are_special_tokens(self) -> None:
        """A special token in a template is the token, not its characters."""
        grammar = CallGrammar(MARKED, (CallFunction("now", {"type": "object"}),))
        matcher = self.compiled("calls", grammar.text).matcher()
        assert matcher.accept(ord("["))
        assert masked(matcher) == [MARK]

    def test_end_token_in_a_template_ends_the_output(self) -> None:
        """If calls end with an end-of-sequence token, the output ends there, after one call."""
        template = CallTemplate("<|call|>", " ", "<|turn|>", separator=";")
        grammar = CallGrammar(template, (CallFunction("now", {"type": "object"}),))
        matcher = self.compiled("calls", grammar.text).matcher()
        for token in (MARK, *b"now {}"):
            assert matcher.accept(token), TOKENS[token]
        assert {EOS, EOT} <= set(masked(matcher))
        assert ord(";") not in masked(matcher)

    def test_optional_calls_allow_text(self) -> None:
        """Without is_required, any text may occur, and a started call is held to its schema."""
        grammar = CallGrammar(TAGGED, (CallFunction("forecast", SCHEMA),), is_required=False)
        matcher = self.compiled("calls", grammar.text).matcher()
        assert {EOS, ord("x"), ord("<")} <= set(masked(matcher))
        for byte in b'I look. <tool_call>{"name": "':
            assert matcher.accept(byte), bytes([byte])
        assert masked(matcher) == [ord("f")]
        for byte in b'forecast", "arguments": {"city": ':
            assert matcher.accept(byte), bytes([byte])
        assert not matcher.accept(ord("5"))
        for byte in b'"x", "days": 3, "units": "metric", "tags": []}}</tool_call>':
            assert matcher.accept(byte), bytes([byte])
        assert {EOS, ord("x")} <= set(masked(matcher))

    def test_only_one_call_without_parallel_calls(self) -> None:
        """Without is_parallel, text after a call does not start another one."""
        grammar = CallGrammar(TAGGED, (CallFunction("now", {"type": "object"}),), False, False)
        matcher = self.compiled("calls", grammar.text).matcher()
        for byte in b'<tool_call>{"name": "now", "arguments": {}}</tool_call> <tool_call':
            assert matcher.accept(byte), bytes([byte])
        assert not matcher.accept(ord(">"))

    def test_answer_may_replace_calls(self) -> None:
        """With an answer, the output is calls or JSON that fits the answer's schema."""
        functions = (CallFunction("now", {"type": "object"}),)
        grammar = CallGrammar(TAGGED, functions, answer={"enum": ["yes", "no"]})
        matcher = self.compiled("calls", grammar.text).matcher()
        assert {ord('"'), ord("<")} <= set(masked(matcher))
        assert not {ord("x"), EOS} & set(masked(matcher))
        for byte in b'"yes"':
            assert matcher.accept(byte), bytes([byte])
        assert EOS in masked(matcher)

    def _refusal(self, kind: GrammarKind, text: str) -> str:
        """Return the message of the refusal, "" if the grammar was compiled."""
        try:
            self.compiled(kind, text)
        except GrammarError as error:
            return str(error)
        return ""

    def _check_calls(self, text: str, template: CallTemplate, is_parallel: bool) -> None:
        assert text.startswith(template.begin) and text.endswith(template.end), text
        body = text.removeprefix(template.begin).removesuffix(template.end)
        num_calls = 0
        while body:
            num_calls += 1
            assert body.startswith(template.call_begin), body
            name, _, rest = body.removeprefix(template.call_begin).partition(
                template.arguments_begin
            )
            arguments, end = json.JSONDecoder().raw_decode(rest)
            assert isinstance(arguments, dict)
            if name == "forecast":
                assert is_forecast(json.dumps(arguments))
            else:
                assert name == "now"
            assert rest[end:].lstrip().startswith(template.call_end), rest[end:]
            body = rest[end:].lstrip().removeprefix(template.call_end)
            if body:
                assert body.startswith(template.separator)
                body = body.removeprefix(template.separator)
        assert num_calls == 1 or (is_parallel and num_calls > 1), text


@cache
def _compiler(spec: GrammarSpec) -> GrammarCompiler:
    compiler = spec.make(VOCABULARY)
    assert isinstance(compiler, GrammarCompiler)
    return compiler
