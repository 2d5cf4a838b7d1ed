"""The grammar of a reply: structured output, forced tool calls, and where the model's reasoning ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenspeed_core.api import CallFunction, CallGrammar, CallTemplate, ReplyEvent
from tokenspeed_core.api.structured_outputs import StructuredOutputs
from tokenspeed_core.commands.serving import BadRequestError, Grammar, Reasoning
from tokenspeed_server.protocol import ChatRequest, CompletionRequest, ToolSpec
from tokenspeed_server.reply_parsers import Parsers
from tokenspeed_server.tool_choice import ToolUse, tool_use

# The text of forced calls if the model's parser has no template, and `ListedCalls` reads.
LISTED = CallTemplate('{"name": "', '", "parameters": ', "}", begin="[", separator=", ", end="]")
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def reply_grammar(
    body: CompletionRequest | ChatRequest, parsers: Parsers, prompt_end: Callable[[], str]
) -> Grammar | None:
    """Return the grammar of a reply, None if it is free. Raises BadRequestError for fields that contradict.

    `prompt_end` returns the text of the end of the prompt, which may have begun or ended the reasoning.
    """
    outputs = body.requested_outputs()
    if not isinstance(body, ChatRequest):
        return None if outputs is None else Grammar(*outputs.kind_and_text())
    use = tool_use(body)
    calls = _call_grammar(use, outputs, call_template(use, parsers))
    if calls is None and outputs is None:
        return None
    reasoning = reply_reasoning(parsers, prompt_end())
    if calls is None:
        assert outputs is not None
        return Grammar(*outputs.kind_and_text(), reasoning)
    # Without an opening mark, the closing one announces an answer, not a call.
    return Grammar("calls", calls.text, reasoning if reasoning and reasoning.begin else None)


def grammar_field(body: CompletionRequest | ChatRequest) -> str:
    """Return the name of the field that the grammar of a reply comes from."""
    return body.output_field() or "tools"


def call_template(use: ToolUse, parsers: Parsers) -> CallTemplate | None:
    """Return the text of calls in a reply; None if it has none that a grammar can describe."""
    _, tool_parser = parsers
    template = None if tool_parser is None else tool_parser.spec.calls
    return LISTED if template is None and use.is_forced else template


def is_listed(use: ToolUse, parsers: Parsers) -> bool:
    """Whether `ListedCalls` parses the reply instead of the model's parser."""
    return use.is_forced and call_template(use, parsers) is LISTED


def can_enforce_schemas(use: ToolUse, parsers: Parsers) -> bool:
    """Whether a grammar can restrict optional calls to the schemas of strict tools."""
    template = call_template(use, parsers)
    return template is not None and bool(CallGrammar(template, ()).trigger)


def _call_grammar(
    use: ToolUse, outputs: StructuredOutputs | None, template: CallTemplate | None
) -> CallGrammar | None:
    """Return the grammar of a reply that may call tools, None if calls are not constrained."""
    if not use.tools or template is None:
        return None
    if use.is_forced:
        functions = _functions(use.tools, only_strict=False)
        return CallGrammar(template, functions, use.is_parallel)
    if outputs is not None:
        kind, text = outputs.kind_and_text()
        if kind != "json":
            raise BadRequestError(
                "with tools, structured output must be a JSON schema: use one, or set tool_choice to none or required",
                "tool_choice",
            )
        functions = _functions(use.tools, only_strict=True)
        return CallGrammar(template, functions, use.is_parallel, answer=_read_schema(text))
    grammar = CallGrammar(
        template, _functions(use.tools, only_strict=True), use.is_parallel, is_required=False
    )
    is_strict = any(tool.function.strict for tool in use.tools)
    return grammar if is_strict and grammar.trigger else None


def _functions(tools: Sequence[ToolSpec], *, only_strict: bool) -> tuple[CallFunction, ...]:
    """Return functions with their schemas; with `only_strict`, others take any object."""
    return tuple(
        CallFunction(
            function.name,
            _ANY_OBJECT
            if only_strict and not function.strict
            else function.parameters or _ANY_OBJECT,
        )
        for function in (tool.function for tool in tools)
    )


def _read_schema(text: str) -> Mapping[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the JSON schema is not valid JSON: {error}") from error
    return schema if isinstance(schema, Mapping) else {}


def reply_reasoning(parsers: Parsers, prompt_end: str) -> Reasoning | None:
    """Return the marks of a reply's reasoning; None if it has none, or if the prompt has ended it."""
    reasoning_parser, _ = parsers
    marks = None if reasoning_parser is None else reasoning_parser.spec.reasoning
    end = prompt_end.rstrip()
    if marks is None or end.endswith(marks.end):
        return None
    is_open = marks.is_open or bool(marks.begin and end.endswith(marks.begin))
    return Reasoning(marks.begin, marks.end, is_open)


class ListedCalls:
    """Parses a reply that is a JSON list of calls, as a whole. A truncated one stays content."""

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> Sequence[ReplyEvent]:
        """Keep the text."""
        self._text += text
        return []

    def finish(self) -> Sequence[ReplyEvent]:
        """Return the calls."""
        try:
            calls = [
                (call["name"], json.dumps(call["parameters"])) for call in json.loads(self._text)
            ]
        except (ValueError, RecursionError, LookupError, TypeError):
            return [ReplyEvent("content", self._text)] if self._text else []
        return [
            event
            for name, arguments in calls
            for event in (ReplyEvent("call", name), ReplyEvent("arguments", arguments))
        ]
