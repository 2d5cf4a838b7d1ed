"""Grammars in llguidance's own formats."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from tokenspeed_core.api import (
    MAX_WHITESPACE,
    CallGrammar,
    GrammarError,
    GrammarKind,
    Vocabulary,
)

_SPACE = f"[ \\n\\r\\t]{{0,{MAX_WHITESPACE}}}"


def grammar_source(kind: GrammarKind, text: str, vocabulary: Vocabulary) -> str:
    """Return a grammar as the text that `LLMatcher` takes. Raises GrammarError."""
    try:
        match kind:
            case "json":
                options = {"whitespace_pattern": _SPACE}
                return LLMatcher.grammar_from_json_schema(text, overrides=options)  # type: ignore[arg-type]
            case "regex":
                return LLMatcher.grammar_from_regex(ascii_classes(text))
            case "choice":
                choices = " | ".join(json.dumps(choice) for choice in json.loads(text))
                return LLMatcher.grammar_from_lark(f"start: {choices}\n")
            case "ebnf":
                return LLMatcher.grammar_from_lark(any_to_lark(text))
            case "calls":
                return LLMatcher.grammar_from_lark(
                    _calls(CallGrammar.read(text).for_vocabulary(vocabulary), vocabulary)
                )
    except Exception as error:  # the converters raise Exception itself
        raise GrammarError(str(error)) from error
    raise GrammarError(f"llguidance does not support grammars of the kind {kind!r}")


def ascii_classes(regex: str) -> str:
    r"""Return a regular expression with \d and \w limited to ASCII.

    Regex engines disagree about the other characters: for Rust a combining mark is a word character.
    """
    plain = {"\\d": "0-9", "\\w": "0-9A-Za-z_"}
    parts, is_in_class = [], False
    for part in re.findall(r"\\.|[\s\S]", regex):
        if part in plain:
            part = plain[part] if is_in_class else f"[{plain[part]}]"
        elif part in "[]":
            is_in_class = part == "["
        parts.append(part)
    return "".join(parts)


def _calls(grammar: CallGrammar, vocabulary: Vocabulary) -> str:
    """Return calls as a Lark grammar."""
    template = grammar.template

    def literal(text: str) -> str:
        parts = vocabulary.parts(text)
        return " ".join(
            f"<[{part}]>" if isinstance(part, int) else json.dumps(part) for part in parts
        )

    rules = [
        f"call: {' | '.join(f'call_{i}' for i in range(len(grammar.functions)))}",
        *(
            f"call_{i}: {json.dumps(function.name)} {literal(template.arguments_begin)} args_{i} "
            f"{literal(template.call_end)}\nargs_{i}: %json {_schema(function.schema)}"
            for i, function in enumerate(grammar.functions)
        ),
    ]
    more = f"({literal(template.separator + template.call_begin)} call)*"
    calls = f"call {more if grammar.is_parallel else ''} {literal(template.end)}"
    if grammar.is_required:
        start = f"{literal(template.begin + template.call_begin)} {calls}"
        if grammar.answer is not None:
            start = f"{start} | answer"
            rules.append(f"answer: %json {_schema(grammar.answer)}")
        return "\n".join([f"start: {start}", *rules, ""])
    trigger, opening = grammar.trigger, template.begin + template.call_begin
    if not trigger:
        raise GrammarError("optional tool calls need a call format that starts with a marker")
    (mark,) = vocabulary.parts(trigger)
    ends = f"TEXT <[{mark}]>" if isinstance(mark, int) else "until"
    return "\n".join(
        [
            f"start: tagged{'*' if grammar.is_parallel else '?'} ending",
            f"tagged: {ends} {literal(opening.removeprefix(trigger))} {calls}",
            f"until[lazy]: TEXT {json.dumps(trigger)}",
            "ending: TEXT" if grammar.is_parallel else "ending: REST",
            f"REST: /(.|\\n)*/ & ~/(.|\\n)*{re.escape(trigger).replace('/', '.')}(.|\\n)*/",
            "TEXT: /(.|\\n)*/",
            *rules,
            "",
        ]
    )


def _schema(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": _SPACE}})
