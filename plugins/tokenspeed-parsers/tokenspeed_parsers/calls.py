"""A call as an object of JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenspeed_core.api import ReplyEvent


def read_json(text: str) -> Any:
    """Return the value that a text is, None for one that is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def call_events(call: Any) -> Sequence[ReplyEvent]:
    """Return the events of an object with a name and arguments (or parameters), none for anything else.

    Arguments are an object, or one as a text; none at all are an empty one.
    """
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str) or not name:
        return []
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, str):
        text = json.dumps(arguments, ensure_ascii=False)
    else:
        text, arguments = arguments, read_json(arguments)
    return (
        [ReplyEvent("call", name), ReplyEvent("arguments", text)]
        if isinstance(arguments, dict)
        else []
    )
