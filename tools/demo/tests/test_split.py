"""Held-out items share no values with training."""

from __future__ import annotations

import gzip
import json
import re
from random import Random

import pytest
from demo_training import words
from demo_training.items import Item, Source, is_held_out
from demo_training.tasks import SCORED, TrainingItems, generate_held_out
from make_held_out import content
from tokenspeed_demo.items import NUM_HELD_OUT, PATH
from tokenspeed_demo.render import Renderer


@pytest.fixture(scope="module")
def held_out() -> dict[str, list[Item]]:
    return {task: generate_held_out(task) for task in SCORED}


@pytest.fixture(scope="module")
def training_items() -> list[Item]:
    stream = TrainingItems("a test")
    return [stream.next() for _ in range(4000)]


@pytest.mark.parametrize("task", SCORED)
def test_held_out_set_has_1000_different_items(held_out: dict[str, list[Item]], task: str) -> None:
    items = held_out[task]
    assert len(items) >= NUM_HELD_OUT >= 1000
    assert len({tuple(message["content"] for message in item.messages) for item in items}) == len(
        items
    )


@pytest.mark.parametrize("task", SCORED)
def test_values_of_held_out_items_are_not_in_training(
    held_out: dict[str, list[Item]], task: str
) -> None:
    assert all(item.keys and all(map(is_held_out, item.keys)) for item in held_out[task])


def test_training_items_have_no_held_out_values(training_items: list[Item]) -> None:
    assert not {key for item in training_items for key in item.keys if is_held_out(key)}


def test_training_has_no_held_out_made_up_words(
    training_items: list[Item], held_out: dict[str, list[Item]]
) -> None:
    listed = {part.lower() for part in (*words.PLAIN, *words.THINGS, *words.WEEKDAYS)}
    kept = {
        key.removeprefix("value:")
        for task in SCORED
        for item in held_out[task]
        for key in item.keys
        if re.fullmatch(r"value:[a-z]{6,}", key)
    } - listed
    renderer = Renderer()
    written = set()
    for item in training_items:
        text = renderer.prompt(item) + renderer.completion(item)
        written |= set(re.findall(r"[a-z]+", text.lower()))
    assert len(kept) > 5000
    # Two words in one name may form a held-out word by chance (`blarkOstie`).
    assert len(kept & written) <= 3


def test_operand_pairs_are_split_in_any_order() -> None:
    trained = Source(Random(1), held_out=False)
    kept = Source(Random(1), held_out=True)

    def pairs(source: Source) -> set[tuple[int, int]]:
        rng = source.rng
        made = [
            source.pair("sum", lambda: (rng.randint(10, 99), rng.randint(10, 99)))
            for _ in range(30_000)
        ]
        return {(min(pair), max(pair)) for pair in made}

    assert not pairs(trained) & pairs(kept)
    assert len(pairs(kept)) > 1000


def test_shipped_items_equal_generated_items() -> None:
    assert json.loads(gzip.decompress(PATH.read_bytes())) == json.loads(gzip.decompress(content()))


def test_seed_determines_the_training_items() -> None:
    def first(seed: str) -> list[Item]:
        stream = TrainingItems(seed)
        return [stream.next() for _ in range(20)]

    assert first("one") == first("one")
    assert first("one") != first("two")
