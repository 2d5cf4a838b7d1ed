"""The command `tokenspeed chat`: its help, and what to import when it runs."""

from __future__ import annotations

from collections.abc import Callable

from tokenspeed_core.commands.settings import SettingsCommand

OVERVIEW = (
    "tokenspeed chat [MODEL] [OPTIONS]",
    "Chat with the server at --base-url, or start a server with the options of serve.",
    (
        ("--base-url URL", "a running server, such as http://127.0.0.1:8000"),
        ("--system TEXT", "the system message"),
        ("--temperature NUMBER", "0 is greedy; default: the model's own"),
        ("--config FILE", "read settings from a YAML file"),
    ),
)


def _load() -> Callable[..., int]:
    from tokenspeed_chat.chat import talk

    return talk


chat = SettingsCommand(OVERVIEW, _load)
