"""Tool calls as JSON objects."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenspeed_core.api import ReplyEvent


def read_json(text: str) -> Any:
    """Return the JSON value of a text, or None."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def call_events(call: Any) -> Sequence[ReplyEvent]:
    """Return the events of an object with a name and arguments (or parameters), or none for
    anything else.

    Arguments may be an object or its JSON text. Missing arguments are an empty object.
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
