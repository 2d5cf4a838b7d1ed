"""Tool calls: choice of a tool, its arguments, and answers from its result."""

from __future__ import annotations

import json
from random import Random

from . import words
from .copying import sentence
from .items import Item, Message, Source, Tool, assistant, user
from .schemas import SPOKEN, MadeTool, Parameter, Value, make_tool

Arguments = dict[str, Value]


def call_text(name: str, arguments: Arguments) -> str:
    """Return a call in the format that the model writes."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def call_message(name: str, arguments: Arguments) -> Message:
    """Return the message of a past call, as an OpenAI client sends it."""
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }


def _phrase(rng: Random, name: str, parameter: Parameter, value: Value) -> str:
    form = rng.choice(parameter.phrases)
    if rng.random() < 0.12:
        form = rng.choice(("with {n} {v}", "{n} {v}", "{n}={v}", "{n}: {v}", "with {n} = {v}"))
    return form.format(n=name, v=value)


_QUESTIONS = (
    "What is the {noun}", "What's the {noun}", "what is the {noun}", "{noun}", "How is the {noun}", "Is there a {noun}",
    "What is the {noun} like", "What's the {noun} like", "Which {noun} is there", "How about the {noun}",
)  # fmt: skip
_LEADS = (
    "", "", "", "", "I'd like to ", "Hi, please ", "Please ", "please ", "Can you ", "Could you ", "I want to ",
    "I need to ", "Now ",
)  # fmt: skip


def _opening(rng: Random, tool: MadeTool, *, shared_noun: bool) -> str:
    """Return the start of a request, which identifies the tool."""
    if not tool.verb or rng.random() < 0.06:
        return rng.choice(
            (
                f"Call {tool.name}",
                f"Use {tool.name}",
                f"run {tool.name}",
                f"Use the tool {tool.name}",
            )
        )
    verb = tool.verb
    if not shared_noun:
        if rng.random() < 0.3 and tool.verb in SPOKEN:
            verb = rng.choice(SPOKEN[tool.verb])
        elif rng.random() < 0.35 and tool.verb in ("get", "check", "show", "find", "fetch"):
            return rng.choice(_QUESTIONS).format(noun=tool.noun)
    new = "a new" if verb in ("create", "add", "book", "make") else "the"
    article = rng.choice(("the", "", "this", "the", "a", "my", new))
    lead = rng.choice(_LEADS)
    text = f"{lead}{verb} {article} {tool.noun}".replace("  ", " ")
    return text[0].upper() + text[1:] if rng.random() < 0.7 else text


def request(source: Source, tool: MadeTool, *, shared_noun: bool) -> tuple[str, Arguments]:
    """Return a request for a call of `tool`, and the arguments in the order of the schema."""
    rng = source.rng
    required = tool.schema["function"]["parameters"]["required"]
    said = [(name, p) for name, p in tool.parameters if name in required or rng.random() < 0.75]
    arguments: Arguments = {name: parameter.make(source) for name, parameter in said}
    phrases = [_phrase(rng, name, parameter, arguments[name]) for name, parameter in said]
    if rng.random() < 0.15:
        # Words that are no argument of any tool.
        phrases.append(
            rng.choice(
                ("today", "now", "right now", "for me", "again", "currently", "as usual", "at once")
            )
        )
    rng.shuffle(phrases)
    end = rng.choice(("", ".", "", "?", "!", " please", ", thanks"))
    return " ".join([_opening(rng, tool, shared_noun=shared_noun), *phrases]) + end, arguments


def toolbox(source: Source, num_tools: int) -> tuple[MadeTool, list[Tool], bool]:
    """Return the tool to call, the schemas of all tools, and whether another tool has the same noun."""
    rng = source.rng
    taken: set[str] = set()
    target = make_tool(source, taken)
    rival = num_tools > 1 and target.verb and rng.random() < 0.3
    made = [target, *(make_tool(source, taken) for _ in range(num_tools - 1 - bool(rival)))]
    if rival:
        made.append(make_tool(source, taken, target.noun))
    shared = any(other.noun == target.noun for other in made[1:])
    schemas = [tool.schema for tool in made]
    rng.shuffle(schemas)
    return target, schemas, shared


def tool_call(source: Source) -> Item:
    """Make a request for one call, with one to four tools."""
    target, schemas, shared = toolbox(source, source.rng.choice((1, 1, 2, 2, 3, 4)))
    prompt, arguments = request(source, target, shared_noun=shared)
    return Item(
        "tool_call", (user(prompt),), call_text(target.name, arguments), source.keys, tuple(schemas)
    )


def two_calls(source: Source) -> Item:
    """Make a request for two calls, of one tool or of two. Not scored."""
    rng = source.rng
    taken: set[str] = set()
    first, second = make_tool(source, taken), make_tool(source, taken)
    if rng.random() < 0.5:
        text, a = request(source, first, shared_noun=True)
        name = rng.choice(list(a))
        parameter = dict(first.parameters)[name]
        b = a | {name: parameter.make(source)}
        glue = rng.choice((" and ", " and also ", ", and "))
        prompt = text.rstrip(".?!") + glue + _phrase(rng, name, parameter, b[name])
        completion = call_text(first.name, a) + "\n" + call_text(first.name, b)
        return Item("two_calls", (user(prompt),), completion, source.keys, (first.schema,))
    a_text, a = request(source, first, shared_noun=True)
    b_text, b = request(source, second, shared_noun=True)
    schemas = [first.schema, second.schema]
    rng.shuffle(schemas)
    prompt = (
        a_text.rstrip(".?!")
        + rng.choice((" and ", ", and also ", ". Then "))
        + b_text[0].lower()
        + b_text[1:]
    )
    completion = call_text(first.name, a) + "\n" + call_text(second.name, b)
    return Item("two_calls", (user(prompt),), completion, source.keys, tuple(schemas))


def no_tool(source: Source) -> Item:
    """Make a request that no given tool can serve. Not scored."""
    taken: set[str] = set()
    wanted = make_tool(source, taken)
    others = [make_tool(source, taken) for _ in range(source.rng.choice((1, 1, 2, 3)))]
    schemas = tuple(tool.schema for tool in others if tool.noun != wanted.noun)
    prompt, _ = request(source, wanted, shared_noun=False)
    answer = (
        "None of the tools that I was given can do that."
        if schemas
        else "I was given no tool that can do that."
    )
    return Item("no_tool", (user(prompt),), answer, source.keys, schemas)


_RESULTS = (
    "temperature", "condition", "price", "status", "total", "name", "date", "time", "count", "result", "city", "owner",
    "delivery_date", "order_id", "seats", "score", "distance", "phone_number", "room", "message", "size", "answer",
    "error", "wind", "humidity", "unit", "id", "title", "location", "balance", "rate", "value", "output", "summary",
)  # fmt: skip


def _result_value(source: Source) -> Value:
    makers = (
        words.word, words.city, words.name, words.date, words.clock, words.code,
        lambda s: words.number(s, 2, 9999), lambda s: words.number(s, 2, 99),
        lambda s: words.number(s, 10, 999) / 10, lambda s: f"{words.number(s, 2, 99)} {words.word(s)}",
    )  # fmt: skip
    value: Value = source.rng.choice(makers)(source)
    return value


def _joined(parts: list[str]) -> str:
    return ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else parts[0]


def result(source: Source) -> tuple[str, str]:
    """Return a tool's result, and the assistant's answer from it."""
    rng = source.rng
    if rng.random() < 0.1:
        text = sentence(source)
        return text, text
    if rng.random() < 0.1:
        key = rng.choice(("results", "items", "files", "names", "matches"))
        found = [words.word(source) for _ in range(rng.randint(2, 4))]
        return json.dumps({key: found}), f"The {key} are {_joined(found)}."
    values = {
        key: _result_value(source) for key in rng.sample(_RESULTS, rng.choice((1, 1, 2, 2, 3)))
    }
    if rng.random() < 0.15:
        value = _result_value(source)
        return str(value), f"The result is {value}."
    parts = [f"the {key.replace('_', ' ')} is {value}" for key, value in values.items()]
    text = _joined(parts)
    return json.dumps(values, ensure_ascii=False), text[0].upper() + text[1:] + "."


def tool_answer(source: Source) -> Item:
    """Make the turn after a tool's result."""
    target, schemas, shared = toolbox(source, source.rng.choice((1, 1, 2, 3)))
    prompt, arguments = request(source, target, shared_noun=shared)
    returned, answer = result(source)
    messages = (
        user(prompt),
        call_message(target.name, arguments),
        {"role": "tool", "content": returned},
    )
    return Item("tool_answer", messages, answer, source.keys, tuple(schemas))


def next_call(source: Source) -> Item:
    """Make a second request for the same tool with another value, after an answered call."""
    rng = source.rng
    target, schemas, shared = toolbox(source, rng.choice((1, 2, 2)))
    prompt, arguments = request(source, target, shared_noun=shared)
    returned, answer = result(source)
    name = rng.choice(list(arguments))
    parameter = dict(target.parameters)[name]
    value = parameter.make(source)
    said = _phrase(rng, name, parameter, value)
    forms = (
        "And {s}?",
        "and {s}?",
        "Now {s}.",
        "The same {s}",
        "What about {s}?",
        "and now {s}",
        "and {s} instead?",
    )
    form = rng.choice(forms)
    messages = (
        user(prompt), call_message(target.name, arguments), {"role": "tool", "content": returned},
        assistant(answer), user(form.format(s=said)),
    )  # fmt: skip
    completion = call_text(target.name, arguments | {name: value})
    return Item("second_turn", messages, completion, source.keys, tuple(schemas))
