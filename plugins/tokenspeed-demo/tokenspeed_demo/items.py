"""The held-out items that score the demo model.

`held_out.json.gz` holds them. `tools/demo` in the repository generates them, together with the
training data that shares no value with them.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

Message = dict[str, Any]
Tool = dict[str, Any]

NUM_HELD_OUT = 1_000  # items of each task
PATH = Path(__file__).resolve().parent / "held_out.json.gz"
END_OF_THINKING = "</think>\n\n"

# The share of exact answers that each task requires.
REQUIRED: Mapping[str, float] = MappingProxyType(
    {
        "sum_two_digits": 0.95,
        "sum_three_digits": 0.85,
        "difference_two_digits": 0.85,
        "difference_three_digits": 0.85,
        "tool_call": 0.95,
        "tool_answer": 0.85,
        "copy": 0.95,
        "edit": 0.85,
        "extract": 0.85,
        "second_turn": 0.85,
    }
)


@dataclass(frozen=True, slots=True)
class Item:
    """A conversation up to the assistant's turn, and the expected turn."""

    task: str
    messages: tuple[Message, ...]
    completion: str  # the whole turn, thinking included, without the end-of-turn token
    keys: frozenset[str] = frozenset()  # values that decide between training and held out
    tools: tuple[Tool, ...] = ()
    enable_thinking: bool = True

    @property
    def answer(self) -> str:
        """The completion without its thinking: the scored part."""
        return self.completion.rpartition(END_OF_THINKING)[2]


def held_out_set(task: str, num_items: int = NUM_HELD_OUT) -> list[Item]:
    """Return the first `num_items` held-out items of a task, the same on every machine."""
    return [
        Item(task, tuple(messages), completion, tools=tuple(tools), enable_thinking=thinking)
        for messages, completion, tools, thinking in _load()[task][:num_items]
    ]


def dump(items: Mapping[str, list[Item]]) -> bytes:
    """Return the content of `held_out.json.gz` for these items, by task."""
    rows = {
        task: [[each.messages, each.completion, each.tools, each.enable_thinking] for each in found]
        for task, found in items.items()
    }
    text = json.dumps(rows, ensure_ascii=False, separators=(",", ":"))
    return gzip.compress(text.encode(), 9, mtime=0)


@cache
def _load() -> dict[str, list[Any]]:
    loaded: dict[str, list[Any]] = json.loads(gzip.decompress(PATH.read_bytes()))
    return loaded
