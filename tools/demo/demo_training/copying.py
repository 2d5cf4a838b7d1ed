"""Exact copies of text, and simple edits."""

from __future__ import annotations

from collections.abc import Callable

from . import words
from .items import Item, Source, user

_COPY_ASKS = (
    "Repeat: {t}", "Repeat this: {t}", "repeat after me: {t}", "Copy this text exactly:\n{t}", "Say {t}",
    "Copy: {t}", "copy this: {t}", "Copy this text:\n{t}", 'Repeat "{t}"', 'Say "{t}"', 'say "{t}"', "Echo: {t}",
    "echo {t}", "Write this again:\n{t}", "Repeat the following text:\n{t}", "Please repeat: {t}",
    "Output this verbatim:\n{t}", 'Copy the text "{t}".', "Repeat exactly what follows.\n\n{t}",
    "Give this back to me unchanged: {t}",
)  # fmt: skip


def sentence(source: Source, shortest: int = 3, longest: int = 12) -> str:
    """Return plain and made-up words, some with a capital and a full stop. A held-out text has a made-up word."""
    rng = source.rng
    count = rng.randint(shortest, longest)
    parts = [
        words.word(source) if rng.random() < 0.3 else rng.choice(words.PLAIN) for _ in range(count)
    ]
    if source.held_out or rng.random() < 0.8:
        parts[rng.randrange(count)] = words.word(source)
    else:
        parts = [rng.choice(words.PLAIN) for _ in range(count)]
    if rng.random() < 0.3:
        parts[rng.randrange(count)] = words.name(source)
    if rng.random() < 0.15:
        parts[rng.randrange(count)] = str(words.number(source, 10, 99999))
    if rng.random() < 0.25 and count > 3:
        parts[rng.randrange(1, count - 1)] += rng.choice((",", ",", ";", ":", " -"))
    if rng.random() < 0.6:
        parts[0] = parts[0][0].upper() + parts[0][1:]
        parts[-1] += rng.choice((".", ".", ".", "!", "?"))
    return " ".join(parts)


def _code_line(source: Source) -> str:
    rng = source.rng
    a, b, c = (words.word(source) for _ in range(3))
    n = words.number(source, 10, 999)
    forms = (
        f"{a} = {b}({c}, {n})", f"def {a}({b}, {c}={n}):", f"return {a}.{b}[{n}]", f"if {a} > {n} and not {b}:",
        f"{a}_{b} = '{c}'", f'{{"{a}": "{b}", "{c}": {n}}}', f"for {a} in {b}_{c}({n}):", f"print(f'{a} {{{b}}}')",
        f"<{a} {b}=\"{c}\">{n}</{a}>", f"git {a} --{b}={c} -n {n}", f"https://{a}.com/{b}?{c}={n}",
    )  # fmt: skip
    return rng.choice(forms)


def _with_symbols(source: Source) -> str:
    rng = source.rng
    parts = sentence(source, 2, 6).split(" ")
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(parts) + 1)
        kind = rng.random()
        if kind < 0.3 and place < len(parts):
            parts[place] += words.symbol(rng)
        elif kind < 0.6 and place < len(parts):
            inside = rng.randrange(len(parts[place]) + 1)
            parts[place] = parts[place][:inside] + words.symbol(rng) + parts[place][inside:]
        else:
            parts.insert(place, words.symbol(rng))
    return " ".join(parts)


def _strings(source: Source) -> str:
    return " ".join(words.random_string(source, 12) for _ in range(source.rng.randint(2, 4)))


def _lines(source: Source) -> str:
    rng = source.rng
    makers = (
        _code_line,
        sentence,
        lambda s: sentence(s, 2, 5),
        lambda s: words.random_string(s, 16),
    )
    mark = rng.choice(("", "", "- ", "* "))
    return "\n".join(mark + rng.choice(makers)(source) for _ in range(rng.randint(2, 5)))


_TEXTS: tuple[tuple[float, Callable[[Source], str]], ...] = (
    (3.0, sentence),
    (1.0, lambda s: sentence(s, 10, 25)),
    (2.0, words.random_string),
    (1.0, _strings),
    (1.0, _code_line),
    (1.2, _with_symbols),
    (0.5, lambda s: sentence(s, 1, 3)),
    (1.0, _lines),
    (0.7, lambda s: " ".join(words.word(s) for _ in range(s.rng.randint(1, 8)))),
    (0.3, words.email),
    (0.3, words.path),
    (0.3, words.code),
)


def text(source: Source) -> str:
    """Return a text to copy."""
    makers = [maker for _, maker in _TEXTS]
    return source.rng.choices(makers, [weight for weight, _ in _TEXTS])[0](source)


def copy(source: Source) -> Item:
    """Make a request to repeat a text unchanged."""
    body = text(source)
    asks = [form for form in _COPY_ASKS if "\n" not in body or "\n{t}" in form]
    return Item("copy", (user(source.rng.choice(asks).format(t=body)),), body, source.keys)


def _frame(source: Source, asks: tuple[str, ...], body: str, **slots: str) -> str:
    """Return an instruction followed by a text: on the same line, on the next line, or in quotes."""
    ask = source.rng.choice(asks).format(**slots)
    return source.rng.choice(
        (f"{ask}: {body}", f"{ask}:\n{body}", f'{ask}: "{body}"', f"{ask}.\n\n{body}")
    )


def _plain_words(source: Source, shortest: int, longest: int) -> list[str]:
    """Return different words, at least one of them made up."""
    rng = source.rng
    count = rng.randint(shortest, longest)
    parts: list[str] = [words.word(source)]
    while len(parts) < count:
        part = words.word(source) if rng.random() < 0.4 else rng.choice(words.PLAIN)
        if part not in parts:
            parts.append(part)
    rng.shuffle(parts)
    return parts


def _replace(source: Source) -> tuple[str, str]:
    parts = _plain_words(source, 3, 10)
    old, new = source.rng.choice(parts), words.word(source)
    asks = ("Replace {old} with {new} in", "replace the word {old} by {new}", 'Replace "{old}" with "{new}"',
            "Change {old} to {new}", "Rename {old} to {new} in")  # fmt: skip
    answer = " ".join(new if part == old else part for part in parts)
    return _frame(source, asks, " ".join(parts), old=old, new=new), answer


def _rename_in_code(source: Source) -> tuple[str, str]:
    a, b, c, new = (words.word(source) for _ in range(4))
    n = words.number(source, 10, 999)
    forms = ("{a} = {b}({c}, {n})", "return {b} + {a} * {c}", "if {a} in {b}: {c}({a})", "def {b}({a}, {c}={n}):",
             "{b}.{c}({a}[{n}])", "{c} = {a} + {n}")  # fmt: skip
    form = source.rng.choice(forms)
    asks = (
        "Rename {old} to {new} in",
        "Rename the variable {old} to {new}",
        "Replace {old} with {new} in",
    )
    before = form.format(a=a, b=b, c=c, n=n)
    return _frame(source, asks, before, old=a, new=new), form.format(a=new, b=b, c=c, n=n)


def _remove(source: Source) -> tuple[str, str]:
    parts = _plain_words(source, 3, 10)
    old = source.rng.choice(parts)
    asks = (
        "Remove the word {old} from",
        "Delete {old} from",
        'Remove "{old}"',
        "Leave out the word {old}",
    )
    return _frame(source, asks, " ".join(parts), old=old), " ".join(
        part for part in parts if part != old
    )


def _reverse(source: Source) -> tuple[str, str]:
    parts = _plain_words(source, 2, 7)
    asks = ("Reverse the order of the words", "Reverse the word order", "Put the words in reverse order",
            "Reverse these words")  # fmt: skip
    return _frame(source, asks, " ".join(parts)), " ".join(reversed(parts))


def _change_case(source: Source) -> tuple[str, str]:
    rng = source.rng
    body = " ".join(_plain_words(source, 1, 5))
    case = rng.choice(("upper", "upper", "lower", "capital"))
    if case == "upper":
        asks: tuple[str, ...] = (
            "Write in capital letters",
            "Make this uppercase",
            "Uppercase",
            "Convert to uppercase",
        )
        ends: tuple[str, ...] = ("in capital letters", "in uppercase", "in upper case")
        before, after = body, body.upper()
    elif case == "lower":
        asks = (
            "Write in small letters",
            "Make this lowercase",
            "Lowercase",
            "Convert to lowercase",
        )
        ends = ("in small letters", "in lowercase", "in lower case")
        before, after = body.upper(), body
    else:
        asks = ("Capitalize each word", "Start each word with a capital", "Capitalize the words")
        ends = ("with each word capitalized",)
        before, after = body, body.title()
    if rng.random() < 0.3:
        quote = rng.choice(('"', "'"))
        return (
            f"{rng.choice(('Write', 'Say', 'write', 'Put'))} {quote}{before}{quote} {rng.choice(ends)}",
            after,
        )
    return _frame(source, asks, before), after


def _pick(source: Source) -> tuple[str, str]:
    parts = _plain_words(source, 3, 7)
    place = source.rng.choice((0, 1, 2, -1))
    label = {0: "first", 1: "second", 2: "third", -1: "last"}[place]
    asks = (
        "What is the {label} word of this text",
        "Give me the {label} word",
        "Write only the {label} word",
    )
    return _frame(source, asks, " ".join(parts), label=label), parts[place]


def _join(source: Source) -> tuple[str, str]:
    parts = _plain_words(source, 2, 7)
    asks, glue = source.rng.choice(
        (
            (("Separate these words with commas", "Put commas between the words"), ", "),
            (("Write each word on its own line", "One word per line"), "\n"),
            (("Join these words with underscores", "Put underscores between the words"), "_"),
        )
    )
    return _frame(source, asks, " ".join(parts)), glue.join(parts)


def _add(source: Source) -> tuple[str, str]:
    parts, new = _plain_words(source, 2, 8), words.word(source)
    if source.rng.random() < 0.5:
        asks = ("Add the word {new} at the end of", "Append {new} to")
        return _frame(source, asks, " ".join(parts), new=new), " ".join([*parts, new])
    asks = ("Add the word {new} at the start of", "Put {new} in front of")
    return _frame(source, asks, " ".join(parts), new=new), " ".join([new, *parts])


_EDITS = (_replace, _replace, _rename_in_code, _remove, _reverse, _change_case, _pick, _join, _add)


def edit(source: Source) -> Item:
    """Make a request for one change to a short text."""
    prompt, answer = source.rng.choice(_EDITS)(source)
    return Item("edit", (user(prompt),), answer, source.keys)


def repeat_many(source: Source) -> Item:
    """Make a request to repeat one word several times. Not scored."""
    rng = source.rng
    count, part = (
        rng.randint(2, 12),
        words.word(source) if rng.random() < 0.6 else rng.choice(words.PLAIN),
    )
    form = rng.choice(
        (
            "Say {w} {n} times.",
            "Write the word {w} {n} times",
            "Repeat {w} {n} times.",
            "{w} {n} times",
        )
    )
    return Item(
        "repeat_many", (user(form.format(w=part, n=count)),), " ".join([part] * count), source.keys
    )
