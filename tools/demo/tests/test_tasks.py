"""Generated answers are correct."""

from __future__ import annotations

import json
import re
from random import Random

import pytest
from demo_training import arithmetic, chat, copying, extraction, tools, turns
from demo_training.items import Item, Source
from demo_training.tasks import TRAINING_MIX, Maker
from tokenspeed_demo.items import held_out_set
from tokenspeed_demo.score import normalized


def items(maker: Maker, num_items: int = 300) -> list[Item]:
    source = Source(Random("a test"), held_out=False)
    made = []
    for _ in range(num_items):
        source.begin()
        made.append(maker(source))
    return made


@pytest.mark.parametrize("maker", [arithmetic.sum_two_digits, arithmetic.sum_three_digits, arithmetic.mixed_digits,
                                   arithmetic.difference_two_digits, arithmetic.difference_three_digits,
                                   arithmetic.three_summands, arithmetic.times_table])  # fmt: skip
def test_arithmetic_answers_are_correct(maker: Maker) -> None:
    for item in items(maker):
        left, right = item.answer.split(" = ")
        assert eval(left) == int(right)
        assert sorted(re.findall(r"\d+", left)) == sorted(
            re.findall(r"\d+", item.messages[-1]["content"])
        )


@pytest.mark.parametrize(("a", "b"), [(58, 67), (999, 1), (7, 8), (500, 50)])
def test_columns_of_the_reasoning_are_correct(a: int, b: int) -> None:
    for columns, expected in (
        (arithmetic.sum_columns(a, b), a + b),
        (arithmetic.difference_columns(max(a, b), min(a, b)), abs(a - b)),
    ):
        digits = ""
        for line in columns.splitlines():
            work, rest = line.split("=")
            assert eval(work) == int(rest.split()[0])
            digits = str(int(rest.split()[0]) % 10) + digits
        assert int(digits) == expected % 10 ** len(digits)


def test_copied_text_is_in_the_request() -> None:
    for item in items(copying.copy):
        assert item.answer in item.messages[-1]["content"]


def test_edits_change_only_the_given_words() -> None:
    for item in items(copying.edit):
        prompt = item.messages[-1]["content"]
        if match := re.match(r'Remove "(\w+)": (.*)$', prompt):
            old, text = match.groups()
            assert item.answer == " ".join(word for word in text.strip('"').split() if word != old)
        if match := re.match(r"Replace (\w+) with (\w+) in:\n(\w+( \w+)*)$", prompt):
            old, new, text, _ = match.groups()
            assert item.answer == " ".join(new if word == old else word for word in text.split())
        if match := re.match(r"Reverse these words: (\w+( \w+)*)$", prompt):
            assert item.answer.split() == match[1].split()[::-1]


def test_extracted_values_are_in_the_sentence() -> None:
    for item in items(extraction.extract):
        for key, value in json.loads(item.answer).items():
            assert str(value) in item.messages[0]["content"]
            assert key in item.messages[0]["content"]


def calls(item: Item) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(str(normalized(item.answer)))
    return found


@pytest.mark.parametrize("maker", [tools.tool_call, tools.two_calls, tools.next_call])
def test_calls_match_a_given_schema(maker: Maker) -> None:
    python_types = {"string": str, "integer": int, "number": int}
    for item in items(maker):
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in item.tools}
        for call in calls(item):
            schema, arguments = schemas[str(call["name"])], call["arguments"]
            assert isinstance(arguments, dict)
            assert set(schema["required"]) <= set(arguments) <= set(schema["properties"])
            for name, value in arguments.items():
                assert isinstance(value, python_types[schema["properties"][name]["type"]])
                assert value in schema["properties"][name].get("enum", [value])


def test_argument_values_are_in_the_request() -> None:
    for item in items(tools.tool_call):
        (call,) = calls(item)
        assert isinstance(call["arguments"], dict)
        assert all(
            str(value) in item.messages[0]["content"] for value in call["arguments"].values()
        )


def test_tools_of_a_request_have_different_names() -> None:
    for item in items(tools.tool_call):
        names = [tool["function"]["name"] for tool in item.tools]
        assert len(names) == len(set(names))


def test_answer_contains_every_value_of_the_result() -> None:
    for item in items(tools.tool_answer):
        returned = item.messages[-1]["content"]
        values = json.loads(returned) if returned.startswith("{") else {"": returned}
        for value in values.values():
            assert all(
                str(part) in item.answer for part in (value if isinstance(value, list) else [value])
            )


def test_second_turn_ends_with_the_user() -> None:
    for item in items(turns.second_turn):
        assert [message["role"] for message in item.messages][-2:] == ["assistant", "user"]


def test_second_sums_are_correct() -> None:
    found = 0
    for item in held_out_set("second_turn"):
        if "<think>" in item.completion:
            left, right = item.answer.split(" = ")
            assert eval(left) == int(right)
            found += item.messages[1]["content"].endswith(f" = {left.split()[0]}")
    assert found > 100


def test_counting_is_complete() -> None:
    for item in items(chat.counting):
        numbers = [int(part) for part in item.answer.split(", ")]
        assert numbers == list(range(numbers[0], numbers[-1] + 1))


@pytest.mark.parametrize("maker", TRAINING_MIX, ids=lambda maker: maker.__name__)
def test_answers_have_no_control_tokens_or_placeholders(maker: Maker) -> None:
    for item in items(maker, 100):
        assert "<|" not in item.completion
        # Text to copy may be code, and code may hold braces.
        copied = maker in (copying.copy, turns.second_turn)
        assert copied or not re.search(r"\{[a-z]{1,3}\}", item.messages[-1]["content"])
        assert item.completion.strip()
