"""The two commands, and the subcommands of `tokenspeed plugins`: only the one that was typed is imported."""

from __future__ import annotations

import json
import os
import shutil
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
from tokenspeed_plugin_tools.layout import folded

NOBODY_READS = 141  # as a shell shows a program that the closed pipe ended
BARE = (
    ["list"],
    ["list", "--json"],
)  # read without typer, which checks values with pydantic: it takes as long again
HELP = "Show the installed plugins, and say what each does here. Without COMMAND: list."


@dataclass(frozen=True, slots=True)
class Subcommand:
    """A function that typer reads its options from ("module:function"), and its line in the help.

    The function returns the exit status, of which `status` is what its own help says. One that takes the options of
    serve has an `OVERVIEW` in its module, since all of these are too many for a page.
    """

    target: str
    text: str
    status: str = "0"
    has_overview: bool = False

    def load(self) -> Callable[..., int]:
        """Import the function."""
        module, _, name = self.target.partition(":")
        function: Callable[..., int] = getattr(import_module(module), name)
        return function

    @property
    def epilog(self) -> str:
        """The last line of its help."""
        return f"Exit status: {self.status}; 2 for a mistake in the question, in one line."

    def print_overview(self, topic: str) -> None:
        """Print its own options and the sections of serve's, or what the latter have about a topic."""
        from tokenspeed_core.commands.settings import print_help

        print_help(import_module(self.target.partition(":")[0]).OVERVIEW, topic)
        if not topic:
            print("", *folded(self.epilog, 0, shutil.get_terminal_size((80, 24)).columns), sep="\n")


SUBCOMMANDS: dict[str, Subcommand] = {
    "list": Subcommand(
        "tokenspeed_plugin_tools.listing:list_plugins",
        "List the installed plugins, importing none.",
    ),
    "info": Subcommand("tokenspeed_plugin_tools.info:info", "Tell all about one distribution."),
    "why": Subcommand(
        "tokenspeed_plugin_tools.why:why",
        "Say why a kernel runs or not, and what would change it.",
        "0; 2 where nothing that was asked for fits, with the candidates",
        has_overview=True,
    ),
    "doctor": Subcommand(
        "tokenspeed_plugin_tools.doctor:doctor",
        "Find what is broken, and the line that mends it.",
        "0 where nothing is, notes apart; 1 where something is",
    ),
    "new": Subcommand(
        "tokenspeed_plugin_tools.new:new",
        "Write a package that installs, passes its tests and serves.",
    ),
    "check": Subcommand(
        "tokenspeed_plugin_tools.check:check",
        "Ask the conformance kit about a distribution.",
        "0 where nothing that was run failed, also where cells wait for another machine; 1 where something did",
    ),
    "freeze": Subcommand(
        "tokenspeed_plugin_tools.freeze:freeze", "Print or write a lock of the plugins as they are."
    ),
    "verify": Subcommand(
        "tokenspeed_plugin_tools.verify:verify",
        "Compare what is installed with a lock.",
        "0 where all is as locked; 1 where anything is not",
    ),
}


def plugins(words: Sequence[str]) -> int:
    """Run a subcommand of `tokenspeed plugins`, or `list`; return the exit status. Raises TokenSpeedError."""
    return _told(_plugins, words)


def env(words: Sequence[str]) -> int:
    """Run `tokenspeed env`; return the exit status. Raises TokenSpeedError."""
    return _told(_env, words)


def _told(run: Callable[[Sequence[str]], int], words: Sequence[str]) -> int:
    """Run; under --json print what is refused as an object with `error`, besides the line that it raises."""
    try:
        return run(words)
    except TokenSpeedError as error:
        if "--json" in words:
            facts = error.facts if isinstance(error, ToolsError) else {}
            with suppress(OSError):  # where that cannot be written either, the line says why
                print(json.dumps({**facts, "error": str(error)}, indent=2, ensure_ascii=False))
        raise


def _plugins(words: Sequence[str]) -> int:
    arguments = list(words)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("--help", "-h")):
        arguments.insert(0, "list")
    if arguments in BARE:
        return _run(
            partial(SUBCOMMANDS["list"].load(), as_json="--json" in arguments),
            "tokenspeed plugins list",
        )
    if not arguments[0].startswith("-") and arguments[0] not in SUBCOMMANDS:
        near = get_close_matches(arguments[0], SUBCOMMANDS, n=1)
        meant = (
            f"did you mean `tokenspeed plugins {near[0]}`?"
            if near
            else f"there is {', '.join(SUBCOMMANDS)}"
        )
        raise ToolsError(f"plugins {arguments[0]}: no such command; {meant}")
    if (
        arguments[0] == "doctor"
    ):  # pydantic looks for its plugins in all metadata, and fails where any is unreadable
        os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    asked = SUBCOMMANDS.get(arguments[0])
    if asked is not None and asked.has_overview:
        from tokenspeed_core.commands.settings import help_topic

        topic = help_topic(arguments)
        if topic is not None:
            return _run(partial(asked.print_overview, topic), f"tokenspeed plugins {arguments[0]}")
    group = _application(HELP)
    group.callback()(_group)
    for name, each in SUBCOMMANDS.items():
        group.command(name, help=each.text, epilog=each.epilog)(
            each.load() if each is asked else _nothing
        )
    return _run(_call(group, arguments, "tokenspeed plugins"), f"tokenspeed plugins {arguments[0]}")


def _env(words: Sequence[str]) -> int:
    from tokenspeed_plugin_tools.env import describe

    app = _application("")
    app.command(help="Describe this machine, for a bug report.")(describe)
    return _run(_call(app, list(words), "tokenspeed env"), "tokenspeed env")


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
    except (
        SystemExit,
        BrokenPipeError,
    ) as error:  # nobody reads: the 1 of click would say something is wrong
        raise SystemExit(NOBODY_READS) from error
    except OSError as error:  # a full disk, a folder that may not be read or written
        where = f"{error.filename}: " if error.filename else ""
        raise ToolsError(f"{name}: {where}{error.strerror}") from error
    return status if isinstance(status, int) else 0


def _group() -> None:
    """Make typer ask for a subcommand even while there is one."""


def _nothing() -> None:
    """Stand in the help for a subcommand that was not asked for."""
