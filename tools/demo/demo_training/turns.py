"""Second turns, which refer to the previous answer or to an earlier message."""

from __future__ import annotations

from collections.abc import Callable

from . import words
from .arithmetic import difference_completion, operand, sum_completion, sum_two_digits
from .chat import small_talk
from .copying import copy, edit, sentence
from .extraction import extract
from .extraction import sentence as facts
from .items import END_OF_THINKING, Item, Source, assistant, user
from .tools import next_call

_MORE = ("Add {n} to that.", "add {n} to that", "Now add {n}.", "now add {n}", "plus {n}?", "Plus {n}", "and {n} more?",
         "What if you add {n}?", "+ {n}", "Add {n} more", "And plus {n}?")  # fmt: skip
_LESS = ("Subtract {n} from that.", "subtract {n}", "Now subtract {n}.", "minus {n}?", "Minus {n}", "- {n}",
         "Now take away {n}.", "take {n} away from that")  # fmt: skip
_FIRST_SUM = (
    "What is {a} + {b}?",
    "{a} + {b}",
    "{a}+{b}",
    "add {a} and {b}",
    "what is {a}+{b}?",
    "{a} plus {b}",
)
_FIRST_COPY = (
    "Repeat: {t}",
    "Copy this text exactly:\n{t}",
    "Say {t}",
    'say "{t}"',
    "Repeat this text:\n{t}",
)


def _answer(completion: str) -> str:
    return completion.rpartition(END_OF_THINKING)[2]


def _and_more(source: Source) -> Item:
    """Make a sum, then add to its result or subtract from it."""
    rng = source.rng
    a, b = source.pair("sum", lambda: (operand(rng, 2), operand(rng, rng.choice((2, 2, 3)))))
    total = a + b
    if rng.random() < 0.65:
        # Pairs are split into training and held-out ones only if both operands have at least two digits.
        _, n = source.pair("sum", lambda: (total, operand(rng, rng.choice((2, 2, 3)))))
        ask, completion = rng.choice(_MORE), sum_completion(total, n)
    else:
        _, n = source.pair("difference", lambda: (total, rng.randint(10, total)))
        ask, completion = rng.choice(_LESS), difference_completion(total, n)
    first = user(rng.choice(_FIRST_SUM).format(a=a, b=b))
    messages = (first, assistant(_answer(sum_completion(a, b))), user(ask.format(n=n)))
    return Item("second_turn", messages, completion, source.keys)


def _and_again(source: Source) -> Item:
    """Make a copy of a text, then another copy or an edit of it."""
    rng = source.rng
    body = sentence(source, 2, 7).rstrip(".!?")
    parts = body.split(" ")
    new = words.word(source)
    old = rng.choice(parts)
    edits = (
        (("Again.", "now copy it again", "Repeat that.", "say it again", "Once more", "Copy it again."), body),
        (("Now in capital letters.", "now uppercase", "Write it in capital letters."), body.upper()),
        (("Now reverse the order of the words.", "reverse the word order", "Now in reverse word order."),
         " ".join(reversed(parts))),
        ((f"Replace {old} with {new}.", f"now replace {old} with {new}", f"Change {old} to {new} in it."),
         " ".join(new if part == old else part for part in parts)),
        ((f"Add the word {new} at the end.", f"now append {new}", f"Put {new} at the end"), f"{body} {new}"),
        (("What was the first word?", "What is its first word?", "only the first word"), parts[0]),
        (("What was the last word?", "What is its last word?", "only the last word"), parts[-1]),
    )  # fmt: skip
    asks, answer = rng.choice((edits[0], *edits))
    messages = (
        user(rng.choice(_FIRST_COPY).format(t=body)),
        assistant(body),
        user(rng.choice(asks)),
    )
    return Item("second_turn", messages, answer, source.keys)


_TELLS: tuple[tuple[tuple[str, ...], tuple[str, ...], Callable[[Source], str], str], ...] = (
    (("My name is {v}.", "I am {v}.", "hi, I'm {v}", "Hello, my name is {v}"),
     ("What is my name?", "what's my name?", "Who am I?", "Do you know my name?"), words.name, "Your name is {v}."),
    (("I live in {v}.", "I am from {v}", "My home is {v}."),
     ("Where do I live?", "where am I from?", "Which city do I live in?"), words.city, "You live in {v}."),
    (("The password is {v}.", "Remember the word {v}.", "Remember this: {v}", "remember {v}"),
     ("What was it?", "What did I ask you to remember?", "What is the word?", "and what was the password?"),
     words.word, "It was {v}."),
    (("My number is {v}.", "My favourite number is {v}"),
     ("What is my number?", "what's my favourite number?", "Which number did I tell you?"),
     lambda s: str(words.number(s, 10, 9999)), "Your number is {v}."),
)  # fmt: skip


def _remember(source: Source) -> Item:
    """Ask for a value that the first turn stated."""
    rng = source.rng
    tells, asks, make, answer = rng.choice(_TELLS)
    value = make(source)
    noted = f"Nice to meet you, {value}!" if make is words.name else "Noted."
    messages = [user(rng.choice(tells).format(v=value)), assistant(noted)]
    return Item(
        "second_turn", (*messages, user(rng.choice(asks))), answer.format(v=value), source.keys
    )


def _state_fact(source: Source) -> Item:
    """Make the first turn of `_remember`. Not scored."""
    rng = source.rng
    tells, _, make, _ = rng.choice(_TELLS)
    value = make(source)
    noted = f"Nice to meet you, {value}!" if make is words.name else "Noted."
    return Item("statement", (user(rng.choice(tells).format(v=value)),), noted, source.keys)


def _about_facts(source: Source) -> Item:
    """Ask for one value of an earlier sentence."""
    rng = source.rng
    text, values = facts(source)
    field = rng.choice(sorted(values))
    tell = rng.choice(
        ("Read this: {t}", "Remember this: {t}", "Here is a note: {t}", "Note: {t}")
    ).format(t=text)
    ask = rng.choice(
        ("What is the {f}?", "what's the {f}?", "Tell me the {f}.", "And the {f}?", "Which {f}?")
    )
    messages = (user(tell), assistant("Noted."), user(ask.format(f=field)))
    return Item("second_turn", messages, str(values[field]), source.keys)


def _repeat_answer(source: Source) -> Item:
    """Ask for a repetition of any previous answer."""
    rng = source.rng
    earlier = rng.choice((small_talk, edit, extract, sum_two_digits, copy))(source)
    asks = (
        "Again.",
        "say it again",
        "Repeat that.",
        "repeat your answer",
        "Please say that again.",
        "What?",
    )
    ask = rng.choice(asks)
    messages = (*earlier.messages, assistant(earlier.answer), user(ask))
    return Item("second_turn", messages, earlier.answer, source.keys)


def second_turn(source: Source) -> Item:
    """Make a turn that needs the previous one for its answer."""
    makers = (_and_more, _and_more, _and_again, _and_again, _repeat_answer, _remember, _about_facts,
              next_call)  # fmt: skip
    return source.rng.choice(makers)(source)


def statement(source: Source) -> Item:
    """Make a statement to acknowledge: a sentence or a fact about the user. Not scored."""
    rng = source.rng
    if rng.random() < 0.7:
        return _state_fact(source)
    text, _ = facts(source)
    tell = rng.choice(
        ("Read this: {t}", "Remember this: {t}", "Here is a note: {t}", "Note: {t}")
    ).format(t=text)
    return Item("statement", (user(tell),), "Noted.", source.keys)
