"""Flags of other engines: those that may stay in a command line, and messages for the others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

TABLES = Path(__file__).with_suffix(".yaml")

ACCEPTED = {
    "enable_auto_tool_choice": "tool calls are on; --tool-call-parser selects the parser",
    "enable_chunked_prefill": "prompts are chunked; --chunked-prefill-size sets the size",
    "async_scheduling": "scheduling always overlaps with the device",
    "use_v2_block_manager": "there is one block manager",
    "disable_log_requests": "requests are logged only with --enable-log-requests",
    "enable_prompt_tokens_details": "usage has the cached tokens; --no-enable-cache-report removes them",
}
"""Switches of other engines for behavior that is always on, with the reason why they are not needed."""
ACCEPTED_WITH_VALUE = {
    "swap_space": "preempted sequences are computed again from the prefix cache",
}


def why_not_needed(name: str) -> str | None:
    """Return why a setting of another engine has no effect, or None if it is not accepted."""
    return ACCEPTED.get(name) or ACCEPTED_WITH_VALUE.get(name)


def alias_hint(name: str, near: Sequence[str] = ()) -> str | None:
    """Return the replacement for a name of another engine, or None if the name is not in the table.

    `near` are settings for which the name may be a misspelling. The table's beginnings do not apply to their topics.
    """
    import yaml  # imported only for unknown names

    key = name.replace("-", "_").removeprefix("no_").partition(".")[0]
    for table in yaml.safe_load(TABLES.read_text()):
        beginnings = [
            each
            for each in table.get("beginnings", ())
            if not any(setting.startswith(each) for setting in near)
        ]
        if key in table["names"] or key.startswith(tuple(beginnings)):
            return str(table["says"]).format(table["names"].get(key))
    why = why_not_needed(key)
    return why and f"not a TokenSpeed setting and not needed: {why}"
