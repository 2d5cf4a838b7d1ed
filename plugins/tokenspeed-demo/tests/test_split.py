"""Nothing that scores the model was seen in training."""

from __future__ import annotations

import hashlib
import re
from random import Random

import pytest
from tokenspeed_demo.training import words
from tokenspeed_demo.training.items import Item, Source, is_held_out
from tokenspeed_demo.training.render import Renderer
from tokenspeed_demo.training.tasks import NUM_HELD_OUT, SCORED, TrainingItems, held_out_set

# Of the prompts and answers of each held-out set: scores compare only over the same sets. They change
# with every edit of a generator, and then the scores in the README must be measured again.
DIGESTS = {
    "sum_two_digits": "bf9a38586d3ce2c8",
    "sum_three_digits": "4ffc17ee6547053f",
    "difference_two_digits": "caaf59b40b4ac665",
    "difference_three_digits": "e5b5c7d9c397bc8f",
    "tool_call": "c9b388d38e42e5b1",
    "tool_answer": "b8bd9408121b9c94",
    "copy": "5c305794809b8e5d",
    "edit": "2dfe46623ebc5e90",
    "extract": "54e460f600f81771",
    "second_turn": "7f1f4f1bbb0ef10a",
}


@pytest.fixture(scope="module")
def training_items() -> list[Item]:
    stream = TrainingItems("a test")
    return [stream.next() for _ in range(4000)]


@pytest.mark.parametrize("task", SCORED)
def test_a_held_out_set_has_a_thousand_different_items(task: str) -> None:
    items = held_out_set(task)
    assert len(items) >= NUM_HELD_OUT >= 1000
    assert len({tuple(message["content"] for message in item.messages) for item in items}) == len(
        items
    )


@pytest.mark.parametrize("task", SCORED)
def test_every_value_of_a_held_out_item_is_kept_from_training(task: str) -> None:
    assert all(item.keys and all(map(is_held_out, item.keys)) for item in held_out_set(task))


def test_no_training_item_holds_a_held_out_value(training_items: list[Item]) -> None:
    assert not {key for item in training_items for key in item.keys if is_held_out(key)}


def test_no_made_up_word_of_the_held_out_sets_is_written_in_training(
    training_items: list[Item],
) -> None:
    listed = {part.lower() for part in (*words.PLAIN, *words.THINGS, *words.WEEKDAYS)}
    held_out = {
        key.removeprefix("value:")
        for task in SCORED
        for item in held_out_set(task)
        for key in item.keys
        if re.fullmatch(r"value:[a-z]{6,}", key)
    } - listed
    renderer = Renderer()
    written = set()
    for item in training_items:
        text = renderer.prompt(item) + renderer.completion(item)
        written |= set(re.findall(r"[a-z]+", text.lower()))
    assert len(held_out) > 5000
    # Syllables of two words may meet in one name (`blarkOstie`): chance, and rare.
    assert len(held_out & written) <= 3


def test_operand_pairs_are_split_whatever_their_order() -> None:
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


@pytest.mark.parametrize("task", SCORED)
def test_the_held_out_sets_are_those_that_were_scored(task: str) -> None:
    renderer, digest = Renderer(), hashlib.sha256()
    for item in held_out_set(task):
        digest.update((renderer.prompt(item) + renderer.completion(item)).encode())
    assert digest.hexdigest()[:16] == DIGESTS[task]


def test_a_stream_of_training_items_repeats_with_its_seed_and_only_then() -> None:
    def first(seed: str) -> list[Item]:
        stream = TrainingItems(seed)
        return [stream.next() for _ in range(20)]

    assert first("one") == first("one")
    assert first("one") != first("two")
