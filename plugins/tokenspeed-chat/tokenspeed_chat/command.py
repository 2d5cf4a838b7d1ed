"""The command `tokenspeed chat`: its help, and the deferred import of its code."""

from __future__ import annotations

from collections.abc import Callable

from tokenspeed_server.settings import ServerConfig

from tokenspeed_core.commands.settings import SettingsCommand

OVERVIEW = (
    "tokenspeed chat [PROMPT] [OPTIONS]",
    "Chat with a running server, or start one with the options of serve. With PROMPT or a pipe, "
    "print one answer and exit.",
    (
        ("--url URL", "A running server; default: the one at --host and --port, or start one."),
        ("--system TEXT", "The system message."),
        ("--temperature NUMBER", "Sampling temperature; 0 is greedy; default: the model's own."),
        ("--max-tokens NUMBER", "Maximum length of an answer."),
        ("--config FILE", "Read settings from a YAML file."),
    ),
)


def _load() -> Callable[..., int]:
    from tokenspeed_chat.chat import talk

    return talk


chat = SettingsCommand(OVERVIEW, _load, ServerConfig)
