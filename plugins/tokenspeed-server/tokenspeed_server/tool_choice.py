"""Which tools a reply may call, and whether it must call one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from tokenspeed_core.commands.serving import BadRequestError
from tokenspeed_server.body_part import BodyPart

if TYPE_CHECKING:
    from tokenspeed_server.protocol import ChatRequest, ToolSpec

_NAME = re.compile(r"[\w.:/-]+")  # characters that need no escape in the formats of calls


class ChosenFunction(BodyPart):
    """A function, by its name."""

    name: str


class ChosenTool(BodyPart):
    """A tool, by its name."""

    type: str = "function"
    function: ChosenFunction


class AllowedTools(BodyPart):
    """Some of the tools."""

    mode: str
    tools: list[ChosenTool]


class ToolChoiceObject(BodyPart):
    """A tool that must be called, or the tools that may be."""

    type: str
    function: ChosenFunction | None = None
    allowed_tools: AllowedTools | None = None


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that a reply may call. With `is_forced`, it must; without `is_parallel`, at most once."""

    tools: Sequence[ToolSpec]
    is_forced: bool = False
    is_parallel: bool = True


def tool_use(body: ChatRequest) -> ToolUse:
    """Read `tools`, `tool_choice` and `parallel_tool_calls`. Raises BadRequestError."""
    tools = {tool.function.name: tool for tool in body.tools or ()}
    choice, is_parallel = body.tool_choice, body.parallel_tool_calls
    if choice == "none":
        return ToolUse(())
    if choice == "auto":
        return ToolUse(tuple(tools.values()), is_parallel=is_parallel)
    if choice == "required":
        _check_names(tools)
        return ToolUse(tuple(tools.values()), True, is_parallel)
    assert not isinstance(choice, str)
    names, is_forced = _read(choice)
    missing = [name for name in names if name not in tools]
    if missing:
        raise BadRequestError(
            f"tool_choice names {missing[0][:64]!r}, which is not in tools", "tool_choice"
        )
    if is_forced:
        _check_names(names)
    is_named = choice["type"] == "function"
    chosen = tuple(tools[name] for name in names)
    return ToolUse(chosen, is_forced, is_parallel and not is_named)


def _read(choice: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Return the names of a choice, and whether one of them must be called."""
    try:
        read = TypeAdapter(ToolChoiceObject).validate_python(choice)
    except ValidationError as error:
        where = ".".join(map(str, ("tool_choice", *error.errors()[0]["loc"])))
        raise BadRequestError(f"{where}: {error.errors()[0]['msg']}", where) from error
    if read.type == "function" and read.function is not None:
        return [read.function.name], True
    if read.type == "allowed_tools" and read.allowed_tools is not None:
        if read.allowed_tools.mode not in ("auto", "required"):
            raise BadRequestError(
                "tool_choice.allowed_tools.mode must be 'auto' or 'required'", "tool_choice"
            )
        names = [tool.function.name for tool in read.allowed_tools.tools]
        return names, read.allowed_tools.mode == "required"
    raise BadRequestError(
        "tool_choice must be 'none', 'auto', 'required', "
        '{"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", ...}',
        "tool_choice",
    )


def _check_names(names: Mapping[str, Any] | Sequence[str]) -> None:
    """Raise BadRequestError if a call cannot be forced."""
    if not names:
        raise BadRequestError("tool_choice forces a call, but there are no tools", "tool_choice")
    for name in names:
        if not _NAME.fullmatch(name):
            raise BadRequestError(
                f"tool_choice cannot force {name[:64]!r}: use letters, digits and _ . : / - in its name",
                "tool_choice",
            )
