"""Tool calls as structural tags."""

from __future__ import annotations

from typing import Any

from tokenspeed_core.api import MAX_WHITESPACE, CallGrammar, GrammarError, Vocabulary
from tokenspeed_grammars_xgrammar.schema import check_schema

Format = dict[str, Any]


def structural_tag(grammar: CallGrammar, vocabulary: Vocabulary) -> Format:
    """Return the structural tag of calls. Raises GrammarError."""
    template = grammar.template

    def text(words: str) -> list[Format]:
        return [
            {"type": "token", "token": part}
            if isinstance(part, int)
            else {"type": "const_string", "value": part}
            for part in vocabulary.parts(words)
        ]

    call = _any_of(
        [
            _sequence(
                text(function.name + template.arguments_begin),
                [_json(function.schema)],
                text(template.call_end),
            )
            for function in grammar.functions
        ]
    )
    more = _sequence(text(template.separator + template.call_begin), [call])
    calls = [call, *([{"type": "star", "content": more}] if grammar.is_parallel else [])]
    opening = template.begin + template.call_begin
    if grammar.is_required:
        forced = _sequence(text(opening), calls, text(template.end))
        answers = [] if grammar.answer is None else [_json(grammar.answer)]
        return {"type": "structural_tag", "format": _any_of([forced, *answers])}
    trigger = grammar.trigger
    if not trigger:
        raise GrammarError("optional tool calls need a call format that starts with a marker")
    rest = _sequence(text(opening.removeprefix(trigger)), calls, text(template.end))
    (mark,) = vocabulary.parts(trigger)
    kind = "token_dispatch" if isinstance(mark, int) else "dispatch"
    first: Format = {"type": kind, "rules": [[mark, rest]], "loop": grammar.is_parallel}
    if grammar.is_parallel:
        return {"type": "structural_tag", "format": first}
    tail = {"type": "any_text", "excludes": [] if isinstance(mark, int) else [mark]}
    once = _sequence([first], [tail])
    return {"type": "structural_tag", "format": _any_of([once, tail])}


def _json(schema: Any) -> Format:
    check_schema(schema)
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITESPACE}


def _sequence(*parts: list[Format]) -> Format:
    elements = [each for part in parts for each in part]
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}


def _any_of(formats: list[Format]) -> Format:
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": formats}
