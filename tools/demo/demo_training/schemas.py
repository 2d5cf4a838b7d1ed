"""Made-up tools: names of a verb and a noun, and parameters with values and phrases for them."""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from . import words
from .items import Source, Tool

Value = str | int | float | bool

VERBS = """get find search book create delete send list check update open close start stop show count order cancel
play read write save load add remove track print share schedule fetch query run set""".split()

NOUNS = """weather flight hotel ticket email message event meeting reminder note file folder invoice price stock song
playlist photo video recipe restaurant taxi train bus package account user customer product report task alarm
timer light door lamp device room table page map route parking news forecast temperature score contact calendar
review branch commit issue server database record job log backup shipment payment exam lesson article image web music
movie game team process thread list item word number password key address country currency rate balance""".split()

# Other words for verbs, used only if no other tool has the same noun.
SPOKEN = {
    "get": ("look up", "tell me", "give me"),
    "find": ("look for",),
    "search": ("look for",),
    "create": ("make", "set up"),
    "delete": ("get rid of", "erase"),
    "show": ("display",),
    "fetch": ("bring me", "load"),
    "start": ("launch", "begin"),
    "stop": ("halt", "end"),
    "check": ("look at",),
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter's schema, and the phrases for its value in a request."""

    names: tuple[str, ...]
    type: str
    make: Callable[[Source], Value]
    phrases: tuple[str, ...]
    description: str
    enum: tuple[str, ...] = ()


def _query(source: Source) -> str:
    rng = source.rng
    parts = [words.word(source), *(rng.choice(words.PLAIN) for _ in range(rng.randint(0, 2)))]
    rng.shuffle(parts)
    return " ".join(parts)


def _title(source: Source) -> str:
    return " ".join(words.word(source).capitalize() for _ in range(source.rng.randint(1, 3)))


_UNITS = ("celsius", "fahrenheit")
_LEVELS = ("low", "medium", "high")
_LANGUAGES = ("English", "French", "German", "Spanish", "Italian", "Japanese")
_SIZES = ("small", "large")


def _one_of(choices: tuple[str, ...]) -> Callable[[Source], Value]:
    return lambda source: source.rng.choice(choices)


PARAMETERS = (
    Parameter(("city", "city", "location", "town", "place"), "string", words.city, ("in {v}", "in {v}", "for {v}"),
              "The city"),
    Parameter(("origin", "from_city", "start"), "string", words.city, ("from {v}",), "Where it begins"),
    Parameter(("destination", "to_city", "target"), "string", words.city, ("to {v}",), "Where it goes"),
    Parameter(("name", "person", "customer", "user", "owner"), "string", words.name, ("for {v}", "of {v}"),
              "Name of the person"),
    Parameter(("date", "day", "due_date"), "string", words.date, ("on {v}", "by {v}"), "Date as YYYY-MM-DD"),
    Parameter(("time", "at", "start_time"), "string", words.clock, ("at {v}",), "Time as HH:MM"),
    Parameter(("weekday", "day_of_week"), "string", lambda s: s.rng.choice(words.WEEKDAYS), ("on {v}",), "Weekday"),
    Parameter(("limit", "max_results", "top_k"), "integer", lambda s: words.number(s, 2, 200),
              ("with at most {v} results", "limit {v}", "(limit {v})", "up to {v} results"), "Most results to return"),
    Parameter(("count", "quantity", "num_guests"), "integer", lambda s: words.number(s, 2, 500),
              ("for {v} people", "{v} times", "for {v} guests"), "How many"),
    Parameter(("days", "num_days", "duration"), "integer", lambda s: words.number(s, 2, 60), ("for {v} days",),
              "Number of days"),
    Parameter(("price", "max_price", "budget"), "number", lambda s: words.number(s, 10, 5000),
              ("under {v} dollars", "for at most {v} dollars", "below {v} euros"), "Highest price"),
    Parameter(("query", "topic", "keyword", "text"), "string", _query,
              ('about "{v}"', "about {v}", 'for "{v}"', "for {v}"), "What to look for"),
    Parameter(("title", "subject", "label"), "string", _title, ('called "{v}"', "titled {v}", 'with the title "{v}"'),
              "The title"),
    Parameter(("email", "recipient", "to"), "string", words.email, ("to {v}", "for {v}"), "Mail address"),
    Parameter(("id", "order_id", "reference", "code"), "string", words.code,
              ("with id {v}", "number {v}", "with the code {v}", "{v}"), "Its identifier"),
    Parameter(("path", "file", "filename"), "string", words.path, ("at {v}", "from {v}", "{v}", "in {v}"), "Path"),
    Parameter(("unit", "units"), "string", _one_of(_UNITS), ("in {v}",), "Unit", _UNITS),
    Parameter(("priority", "level"), "string", _one_of(_LEVELS), ("with {v} priority", "with priority {v}"),
              "Priority", _LEVELS),
    Parameter(("language", "lang"), "string", _one_of(_LANGUAGES), ("in {v}",), "Language", _LANGUAGES),
    Parameter(("size",), "string", _one_of(_SIZES), ("in size {v}", "size {v}"), "Size", _SIZES),
    Parameter(("seconds", "timeout", "delay"), "integer", lambda s: words.number(s, 10, 900),
              ("after {v} seconds", "in {v} seconds"), "Seconds to wait"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MadeTool:
    """A tool, with the verb and noun of its name."""

    name: str
    verb: str
    noun: str
    parameters: tuple[tuple[str, Parameter], ...]  # (its name in this tool, the parameter)
    schema: Tool


def _styled(rng: Random, verb: str, noun: str) -> str:
    style = rng.random()
    if style < 0.85:
        return f"{verb}_{noun}"
    return f"{verb}{noun.capitalize()}" if style < 0.95 else f"{verb}-{noun}"


def _unseen_parameter(source: Source) -> tuple[str, Parameter]:
    """Return a parameter with a made-up name. Only the name identifies its value in a request."""
    rng = source.rng
    name = words.word(source)
    whole = rng.random() < 0.4
    phrases = (
        "with {n} {v}",
        "{n} {v}",
        "{n}={v}",
        "and {n} {v}",
        "with {n} set to {v}",
        "{n}: {v}",
    )
    make: Callable[[Source], Value] = (lambda s: words.number(s, 2, 9999)) if whole else words.word
    kind = "integer" if whole else "string"
    return name, Parameter((name,), kind, make, phrases, f"The {name}")


def _parameters(source: Source) -> tuple[tuple[str, Parameter], ...]:
    rng = source.rng
    chosen: dict[str, Parameter] = {}
    phrases: set[str] = set()
    for parameter in rng.sample(PARAMETERS, rng.choice((1, 1, 2, 2, 2, 3, 3))):
        name = rng.choice(parameter.names)
        if name in chosen or phrases & set(parameter.phrases):
            continue
        chosen[name] = parameter
        phrases |= set(parameter.phrases)
    if rng.random() < 0.15:
        name, parameter = _unseen_parameter(source)
        chosen[name] = parameter
    return tuple(chosen.items())


def _description(rng: Random, verb: str, noun: str) -> str:
    forms = (
        f"{verb.capitalize()} the {noun}", f"{verb.capitalize()} a {noun}.", f"{verb} {noun}",
        f"Use this to {verb} a {noun}.", f"{verb.capitalize()}s the {noun}.", f"{verb.capitalize()} the current {noun}",
        f"{verb.capitalize()} {noun} information", f"A tool to {verb} the {noun} of the user",
    )  # fmt: skip
    about = rng.choice(forms)
    if rng.random() < 0.2:
        more = " ".join(rng.choice(words.PLAIN) for _ in range(rng.randint(3, 9)))
        about = about.rstrip(".") + rng.choice(
            (" in a given location.", " by name", ", and " + more, ". " + more)
        )
    return about


def _hint(source: Source, key: str, parameter: Parameter) -> str:
    """Return a parameter's description, sometimes with an example that the call must not use."""
    rng = source.rng
    about = rng.choice(
        (
            parameter.description,
            parameter.description,
            f"The {key.replace('_', ' ')}",
            f"{key} to use",
        )
    )
    return about + f", e.g. {parameter.make(source)}" if rng.random() < 0.2 else about


def _schema(
    source: Source, name: str, about: str, parameters: tuple[tuple[str, Parameter], ...]
) -> Tool:
    rng = source.rng
    properties: dict[str, Tool] = {}
    described = rng.random() < 0.6
    for key, parameter in parameters:
        properties[key] = {"type": parameter.type}
        if parameter.enum:
            properties[key]["enum"] = list(parameter.enum)
        if described and rng.random() < 0.9:
            properties[key]["description"] = _hint(source, key, parameter)
    function: Tool = {"name": name}
    if rng.random() < 0.9:
        function["description"] = about
    required = [key for key, _ in parameters][: rng.randint(1, len(parameters))]
    function["parameters"] = {"type": "object", "properties": properties, "required": required}
    tool: Tool = {"type": "function", "function": function}
    return shuffled(rng, tool) if rng.random() < 0.15 else tool


def shuffled(rng: Random, value: Tool) -> Tool:
    """Return a schema with its keys in random order, except the parameters', as clients order them differently."""
    keys = sorted(value)
    rng.shuffle(keys)
    return {
        key: shuffled(rng, value[key])
        if isinstance(value[key], dict) and key != "properties"
        else value[key]
        for key in keys
    }


def make_tool(source: Source, taken: set[str], noun: str = "") -> MadeTool:
    """Return a tool on the source's side of the split. Its name is not in `taken`; `noun` sets its noun."""
    rng = source.rng
    if not noun and rng.random() < 0.06:
        return _named_tool(source)

    def make() -> str:
        return f"{rng.choice(VERBS)}_{noun or rng.choice(NOUNS)}"

    while (canonical := source.draw("tool", make)) in taken:
        pass
    taken.add(canonical)
    verb, noun = canonical.split("_")
    parameters = _parameters(source)
    name = _styled(rng, verb, noun)
    return MadeTool(
        name,
        verb,
        noun,
        parameters,
        _schema(source, name, _description(rng, verb, noun), parameters),
    )


def _named_tool(source: Source) -> MadeTool:
    """Return a tool with a made-up name. A request can identify it only by this name."""
    rng = source.rng
    name = source.draw("tool", lambda: words.made_up(rng))
    parameters = _parameters(source)
    about = rng.choice(
        (f"Runs {name}", "A tool", "Does something " + rng.choice(string.ascii_uppercase))
    )
    return MadeTool(name, "", name, parameters, _schema(source, name, about, parameters))
