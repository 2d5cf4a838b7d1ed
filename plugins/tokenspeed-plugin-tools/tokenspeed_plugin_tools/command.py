"""The commands `tokenspeed plugins` and `tokenspeed env`. Only the requested subcommand is imported."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from typing import Any

import typer

from tokenspeed_core import TokenSpeedError
from tokenspeed_plugin_tools.errors import ToolsError

CLOSED_PIPE_STATUS = 141
# Typer checks values with pydantic, which takes as long to import as listing plugins.
_WITHOUT_TYPER = (["list"], ["list", "--json"])


@dataclass(frozen=True, slots=True)
class Subcommand:
    """A function as "module:function", and its help. Its parameters are the options.

    `status` describes the exit status. With `has_overview`, the command takes all flags of serve and its
    module has an `OVERVIEW`.
    """

    target: str
    text: str
    status: str = "0"
    has_overview: bool = False

    @property
    def module(self) -> Any:
        """The module of the function."""
        return import_module(f"tokenspeed_plugin_tools.{self.target.partition(':')[0]}")

    def load(self) -> Callable[..., int]:
        """Import the function."""
        function: Callable[..., int] = getattr(self.module, self.target.partition(":")[2])
        return function

    @property
    def epilog(self) -> str:
        """The last line of the help."""
        return f"Exit status: {self.status}; 2 for a usage error."


SUBCOMMANDS: dict[str, Subcommand] = {
    "list": Subcommand("listing:list_plugins", "List the installed plugins without importing any."),
    "info": Subcommand("info:info", "Show one distribution in detail."),
    "why": Subcommand(
        "why:why",
        "Show which kernel is selected for an op, and why others are not.",
        "0; 2 if no requested kernel fits",
        has_overview=True,
    ),
    "doctor": Subcommand(
        "doctor:doctor",
        "Find broken installations and show how to repair them.",
        "0, or 1 if a problem was found",
    ),
    "new": Subcommand(
        "new:new", "Write a plugin package that installs, passes its tests and serves."
    ),
    "check": Subcommand(
        "check:check",
        "Run the conformance kit on a distribution.",
        "0, or 1 if a test failed",
    ),
    "freeze": Subcommand("freeze:freeze", "Write a lock file of the installed plugins."),
    "verify": Subcommand(
        "verify:verify",
        "Compare the installed plugins with a lock file.",
        "0, or 1 if they differ",
    ),
}


def plugins(words: Sequence[str]) -> int:
    """Run a subcommand of `tokenspeed plugins`; return the exit status. Raises TokenSpeedError."""
    return _with_json_errors(_plugins, words)


def env(words: Sequence[str]) -> int:
    """Run `tokenspeed env`; return the exit status. Raises TokenSpeedError."""
    return _with_json_errors(_env, words)


def _with_json_errors(run: Callable[[list[str]], int], words: Sequence[str]) -> int:
    """Run a command. With --json, print an error as an object as well as raising it."""
    try:
        return run(list(words))
    except TokenSpeedError as error:
        if "--json" in words:
            facts = error.facts if isinstance(error, ToolsError) else {}
            with suppress(OSError):
                print(json.dumps({**facts, "error": str(error)}, indent=2, ensure_ascii=False))
        raise


def _plugins(words: list[str]) -> int:
    if not words or (words[0].startswith("-") and words[0] not in ("--help", "-h")):
        words = ["list", *words]
    if words in _WITHOUT_TYPER:
        list_plugins = SUBCOMMANDS["list"].load()
        return _run(partial(list_plugins, as_json="--json" in words), "tokenspeed plugins list")
    name = words[0]
    command = SUBCOMMANDS.get(name)
    if command is None and not name.startswith("-"):
        near = get_close_matches(name, SUBCOMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(SUBCOMMANDS)}"
        raise ToolsError(f"plugins {name}: no such command; {hint}")
    if command is not None and command.has_overview:
        from tokenspeed_core.commands.settings import config_of, help_topic, print_help

        topic = help_topic(words)
        if topic is not None:
            return _run(
                partial(print_help, config_of("serve"), command.module.OVERVIEW, topic), name
            )
    app = _application("Show the installed plugins. Without COMMAND: list.")
    app.callback()(_group)
    for each, subcommand in SUBCOMMANDS.items():
        function = subcommand.load() if subcommand is command else _placeholder
        app.command(each, help=subcommand.text, epilog=subcommand.epilog)(function)
    return _run(_call(app, words, "tokenspeed plugins"), f"tokenspeed plugins {name}")


def _env(words: list[str]) -> int:
    from tokenspeed_plugin_tools.env import describe

    app = _application("")
    app.command(help="Describe this machine, for bug reports.")(describe)
    return _run(_call(app, words, "tokenspeed env"), "tokenspeed env")


def _application(text: str) -> typer.Typer:
    return typer.Typer(
        help=text,
        rich_markup_mode=None,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
    )


def _call(app: typer.Typer, words: list[str], name: str) -> Callable[[], Any]:
    return partial(app, words, prog_name=name, standalone_mode=False)


def _run(call: Callable[[], Any], name: str) -> int:
    try:
        status = call()
    except (SystemExit, BrokenPipeError) as error:
        # click exits with 1 on a closed pipe, which would mean that a problem was found.
        raise SystemExit(CLOSED_PIPE_STATUS) from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise ToolsError(f"{name}: {where}{error.strerror}") from error
    return status if isinstance(status, int) else 0


def _group() -> None:
    """Make typer expect a subcommand."""


def _placeholder() -> None:
    """Placeholder for a subcommand that was not requested."""
