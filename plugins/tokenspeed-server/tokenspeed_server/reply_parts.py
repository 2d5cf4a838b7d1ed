"""The deltas of a chat's message as typed parts, for APIs with answers made of typed blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from tokenspeed_server.parser_chain import Delta

Kind = Literal["text", "reasoning", "call"]


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a block. `call_id` and `name` are set where a call begins; its text is arguments."""

    kind: Kind
    text: str
    call_id: str | None = None
    name: str = ""


@dataclass(slots=True)
class Block:
    """A whole block: text, reasoning, or a call with the text of its arguments."""

    kind: Kind
    text: str = ""
    call_id: str = ""
    name: str = ""


def parts_of(delta: Delta) -> Iterator[Part]:
    """Yield the parts of a delta."""
    if isinstance(delta, str):
        if delta:
            yield Part("text", delta)
        return
    if delta.get("content"):
        yield Part("text", delta["content"])
    if delta.get("reasoning_content"):
        yield Part("reasoning", delta["reasoning_content"])
    for call in delta.get("tool_calls", ()):
        function = call["function"]
        yield Part("call", function.get("arguments", ""), call.get("id"), function.get("name", ""))


def blocks_of(deltas: Iterable[Delta]) -> list[Block]:
    """Return the blocks that the deltas add up to."""
    blocks: list[Block] = []
    for part in (part for delta in deltas for part in parts_of(delta)):
        if not blocks or begins_block(part, blocks[-1].kind):
            blocks.append(Block(part.kind, part.text, part.call_id or "", part.name))
        else:
            blocks[-1].text += part.text
    return blocks


def begins_block(part: Part, current: Kind | None) -> bool:
    """Return whether a part begins a block after one of the kind `current`."""
    return part.kind != current or part.call_id is not None
