"""The tasks, their share of training, and the held-out sets that score the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from tokenspeed_demo.items import NUM_HELD_OUT

from . import arithmetic, chat, copying, extraction, tools, turns
from .items import Item, Message, Source, assistant

Maker = Callable[[Source], Item]

# The relative frequency of each task in training.
TRAINING_MIX: dict[Maker, float] = {
    arithmetic.sum_two_digits: 7,
    arithmetic.sum_three_digits: 9,
    arithmetic.difference_two_digits: 5,
    arithmetic.difference_three_digits: 6,
    arithmetic.mixed_digits: 4,
    arithmetic.three_summands: 2,
    arithmetic.times_table: 1,
    arithmetic.out_of_reach: 1,
    copying.copy: 18,
    copying.edit: 14,
    copying.repeat_many: 1,
    extraction.extract: 13,
    tools.tool_call: 24,
    tools.two_calls: 3,
    tools.no_tool: 3,
    tools.tool_answer: 7,
    turns.second_turn: 16,
    turns.statement: 2,
    chat.small_talk: 4,
    chat.unknown: 3,
    chat.persona: 1.5,
    chat.counting: 1,
}


SCORED: dict[str, Maker] = {
    "sum_two_digits": arithmetic.sum_two_digits,
    "sum_three_digits": arithmetic.sum_three_digits,
    "difference_two_digits": arithmetic.difference_two_digits,
    "difference_three_digits": arithmetic.difference_three_digits,
    "tool_call": tools.tool_call,
    "tool_answer": tools.tool_answer,
    "copy": copying.copy,
    "edit": copying.edit,
    "extract": extraction.extract,
    "second_turn": turns.second_turn,
}

HELD_OUT_SEED = 20_001


def generate_held_out(task: str, num_items: int = NUM_HELD_OUT) -> list[Item]:
    """Return the first `num_items` held-out items of a task. All differ, and every machine makes the same."""
    source = Source(Random(f"{HELD_OUT_SEED} {task}"), held_out=True)
    items: list[Item] = []
    seen: set[tuple[str, ...]] = set()
    while len(items) < num_items:
        source.begin()
        item = SCORED[task](source)
        contents = tuple(message["content"] for message in item.messages)
        if contents in seen or not item.keys:
            continue
        seen.add(contents)
        items.append(item)
    return items


class TrainingItems:
    """An endless seeded stream of training items: a mix of tasks with history, system prompts and tools."""

    def __init__(self, seed: int | str) -> None:
        self.rng = Random(seed)
        self._source = Source(self.rng, held_out=False)
        self._makers = list(TRAINING_MIX)
        self._weights = list(TRAINING_MIX.values())

    def _plain(self) -> Item:
        self._source.begin()
        return self.rng.choices(self._makers, self._weights)[0](self._source)

    def next(self) -> Item:
        """Return an item, often with a system prompt, earlier turns or tools as in a real conversation."""
        rng = self.rng
        item = self._plain()
        keys = item.keys
        messages: tuple[Message, ...] = item.messages
        has_system = messages[0]["role"] == "system"
        if rng.random() < 0.15 and not has_system:
            for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 5, 8))):
                earlier = self._plain()
                if earlier.tools or earlier.messages[0]["role"] == "system":
                    continue
                messages = (*earlier.messages, assistant(earlier.answer), *messages)
                keys |= earlier.keys
        if rng.random() < 0.3 and not has_system:
            messages = (chat.system_prompt(self._source), *messages)
        if not item.tools and item.task != "unknown" and rng.random() < 0.04:
            _, schemas, _ = tools.toolbox(self._source, rng.choice((1, 1, 2, 3)))
            item = replace(item, tools=tuple(schemas))
            keys |= self._source.keys
        if rng.random() < 0.15:
            item = replace(item, enable_thinking=False, completion=item.answer)
        return replace(item, messages=messages, keys=keys)
