"""Sums and differences of numbers up to three digits, computed column by column."""

from __future__ import annotations

from random import Random

from . import words
from .items import END_OF_THINKING, Item, Source, user

_SUM_ASKS = (
    "What is {a} + {b}?", "what is {a}+{b}?", "What's {a} + {b}?", "What is {a} plus {b}?", "{a} + {b}",
    "{a}+{b}", "{a} + {b} = ?", "{a}+{b}=", "{a} + {b} =", "{a}+{b}?", "{a} plus {b}", "Add {a} and {b}.",
    "add {a} and {b}", "Add {a} to {b}.", "Calculate {a} + {b}.", "calculate {a}+{b}", "Compute {a} + {b}",
    "How much is {a} + {b}?", "how much is {a} plus {b}?", "The sum of {a} and {b}?",
    "What is the sum of {a} and {b}?", "Please add {a} and {b}.", "Can you add {a} and {b}?",
    "Tell me {a} + {b}.", "Solve {a} + {b}", "What do you get if you add {a} and {b}?",
)  # fmt: skip
_SUM_STORIES = (
    "{name} has {a} {things} and gets {b} more. How many {things} does {name} have?",
    "There are {a} {things} in one box and {b} in another. How many are there?",
    "I have {a} {things} and buy {b} more. How many do I have now?",
    "{name} found {a} {things} on {day} and {b} the day after. How many in total?",
)
_DIFFERENCE_ASKS = (
    "What is {a} - {b}?", "what is {a}-{b}?", "What's {a} - {b}?", "What is {a} minus {b}?", "{a} - {b}",
    "{a}-{b}", "{a} - {b} = ?", "{a}-{b}=", "{a} - {b} =", "{a} minus {b}", "Subtract {b} from {a}.",
    "subtract {b} from {a}", "Take {b} away from {a}.", "Calculate {a} - {b}.", "calculate {a}-{b}",
    "Compute {a} - {b}", "How much is {a} - {b}?", "how much is {a} minus {b}?",
    "What is the difference of {a} and {b}?", "Please subtract {b} from {a}.", "Solve {a} - {b}",
)  # fmt: skip
_PRODUCT_ASKS = (
    "What is {a} * {b}?", "{a} * {b}", "{a}*{b}", "{a} times {b}", "what is {a} times {b}?", "{a} x {b}",
    "Multiply {a} by {b}.", "{a}*{b}=", "What is {a} x {b}?", "Calculate {a} * {b}",
)  # fmt: skip
_DIFFERENCE_STORIES = (
    "{name} has {a} {things} and gives away {b}. How many {things} are left?",
    "I had {a} {things} and lost {b}. How many do I have now?",
)


def sum_columns(a: int, b: int) -> str:
    """Return the column additions of a + b, ones first, as lines `x+y+carry=total carry c`."""
    lines = []
    carry = 0
    for place in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        lines.append(f"{x}+{y}+{carry}={total} carry {total // 10}")
        carry = total // 10
    return "\n".join(lines)


def difference_columns(a: int, b: int) -> str:
    """Return the column subtractions of a - b (a is the larger number), ones first."""
    lines = [f"{a} is less than {b}"] if a < b else []
    a, b = max(a, b), min(a, b)
    borrow = 0
    for place in range(len(str(a))):
        x, y = a // 10**place % 10, b // 10**place % 10
        rest = x - y - borrow
        if rest < 0:
            lines.append(f"1{x}-{y}-{borrow}={rest + 10} borrow 1")
        else:
            lines.append(f"{x}-{y}-{borrow}={rest} borrow 0")
        borrow = int(rest < 0)
    return "\n".join(lines)


def sum_completion(a: int, b: int) -> str:
    return f"<think>\n{sum_columns(a, b)}\n{END_OF_THINKING}{a} + {b} = {a + b}"


def difference_completion(a: int, b: int) -> str:
    return f"<think>\n{difference_columns(a, b)}\n{END_OF_THINKING}{a} - {b} = {a - b}"


def operand(rng: Random, digits: int) -> int:
    """Return a number of exactly `digits` digits; 0 counts as one digit."""
    return rng.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1)


def _ask(source: Source, asks: tuple[str, ...], stories: tuple[str, ...], a: int, b: int) -> str:
    rng = source.rng
    form = rng.choice(stories) if rng.random() < 0.1 else rng.choice(asks)
    slots = {"a": a, "b": b, "things": rng.choice(words.THINGS), "day": rng.choice(words.WEEKDAYS)}
    if "{name}" in form:
        slots["name"] = words.name(source)
    return form.format(**slots)


def _sum(source: Source, task: str, digits: tuple[int, int]) -> Item:
    rng = source.rng
    a, b = source.pair("sum", lambda: (operand(rng, digits[0]), operand(rng, digits[1])))
    text = _ask(source, _SUM_ASKS, _SUM_STORIES, a, b)
    return Item(task, (user(text),), sum_completion(a, b), source.keys)


def _difference(source: Source, task: str, digits: tuple[int, int]) -> Item:
    rng = source.rng

    def make() -> tuple[int, int]:
        a = operand(rng, digits[0])
        near = rng.random() < 0.2 and not source.held_out
        return a, max(0, a + rng.randint(-12, 12)) if near else operand(rng, digits[1])

    a, b = source.pair("difference", make)
    if a < b and (source.held_out or rng.random() < 0.8):
        a, b = b, a
    text = _ask(source, _DIFFERENCE_ASKS, _DIFFERENCE_STORIES if a >= b else _DIFFERENCE_ASKS, a, b)
    return Item(task, (user(text),), difference_completion(a, b), source.keys)


def sum_two_digits(source: Source) -> Item:
    return _sum(source, "sum_two_digits", (2, 2))


def sum_three_digits(source: Source) -> Item:
    return _sum(source, "sum_three_digits", (3, 3))


def difference_two_digits(source: Source) -> Item:
    return _difference(source, "difference_two_digits", (2, 2))


def difference_three_digits(source: Source) -> Item:
    return _difference(source, "difference_three_digits", (3, 3))


def mixed_digits(source: Source) -> Item:
    """Make a sum or difference of operands of different lengths. Not scored."""
    rng = source.rng
    make = _sum if rng.random() < 0.6 else _difference
    return make(source, "mixed_digits", (rng.randint(1, 3), rng.randint(1, 3)))


def three_summands(source: Source) -> Item:
    """Make a sum of three numbers. Not scored."""
    rng = source.rng
    a, b = source.pair(
        "sum", lambda: (operand(rng, rng.randint(1, 3)), operand(rng, rng.randint(1, 3)))
    )
    _, c = source.pair("sum", lambda: (a + b, operand(rng, rng.randint(1, 3))))
    form = rng.choice(
        ("What is {a} + {b} + {c}?", "{a} + {b} + {c}", "{a}+{b}+{c}", "Add {a}, {b} and {c}.")
    )
    thinking = f"{sum_columns(a, b)}\n{a} + {b} = {a + b}\n{sum_columns(a + b, c)}"
    completion = f"<think>\n{thinking}\n{END_OF_THINKING}{a} + {b} + {c} = {a + b + c}"
    return Item("three_summands", (user(form.format(a=a, b=b, c=c)),), completion, source.keys)


def times_table(source: Source) -> Item:
    """Make a product of the times table up to 12. Not scored; all products are in training."""
    rng = source.rng
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    form = rng.choice(_PRODUCT_ASKS)
    return Item("times_table", (user(form.format(a=a, b=b)),), f"{a} * {b} = {a * b}", source.keys)


def out_of_reach(source: Source) -> Item:
    """Make a calculation that the model does not learn. The answer says so. Not scored."""
    rng = source.rng
    a, b = rng.randint(1000, 99999), rng.randint(2, 99999)
    small, large = rng.randint(2, 99), rng.randint(13, 999)
    forms = (
        f"What is {a} + {b}?", f"{a} - {b}", f"{a}+{b}", f"{large} / {small}", f"What is {large} divided by {small}?",
        f"{large} * {large + small}", f"What is {large} times {large - 1}?", f"What is the square root of {large}?",
    )  # fmt: skip
    form = rng.choice(forms)
    answer = "That is beyond me. I add and subtract numbers of up to three digits."
    return Item("out_of_reach", (user(form),), answer, source.keys)
