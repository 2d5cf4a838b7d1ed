"""Builds the command line and turns whatever goes wrong into one line and an exit status."""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from importlib.metadata import distributions, metadata
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenspeed_core import __version__
from tokenspeed_core.errors import PluginError, TokenSpeedError, printable, suggest

if TYPE_CHECKING:
    from tokenspeed_core.plugins import Catalog, Entry

UsageError: Any = typer.BadParameter.__mro__[1]  # of click, which newer releases of typer bundle
USAGE_STATUS = 2
_TOLD = (UsageError, TokenSpeedError, typer.Exit, typer.Abort, BrokenPipeError, SystemExit)


BROUGHT_BY = {
    "bench": "tokenspeed-bench",
    "chat": "tokenspeed-chat",
    "env": "tokenspeed-plugin-tools",
    "plugins": "tokenspeed-plugin-tools",
    "serve": "tokenspeed-server",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `tokenspeed` with these arguments (the process's own when None); return the exit status."""
    try:
        return _run(arguments)
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (
                OSError
            ):  # nobody reads, or the disk is full: Python would end with a status of its own
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _run(arguments: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    command = None if words[0].startswith("-") else words[0]
    try:
        app = build(command)
        status = app(words, prog_name="tokenspeed", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except UsageError as error:
        explained = _explain_usage(error, command)
        if "--json" in words:  # all else that is refused under it a command tells itself
            typer.echo(json.dumps({"error": explained}, indent=2, ensure_ascii=False))
        return _say(explained)
    except TokenSpeedError as error:
        if (
            logging.root.isEnabledFor(logging.DEBUG)
            or os.environ.get("TOKENSPEED_LOG_LEVEL", "").lower() == "debug"
        ):
            typer.echo(printable(traceback.format_exc()), err=True)
        return _say(str(error))
    except UnicodeDecodeError as error:
        return _say(_explain_undecodable(error))
    except typer.Exit as error:
        return error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        return 141


def build(command: str | None) -> typer.Typer:
    """Build the command line. Only the command asked for is imported (all of them for completion).

    `command` None stands for words without one, such as --help. Only there are typer's own options, for help and for
    completion: their values, typed or not, it checks with pydantic, whose import takes longer than most commands.
    """
    app = typer.Typer(
        name="tokenspeed",
        help="Fast inference of language models, built of plugins.",
        rich_markup_mode=None,
        add_completion=command is None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"] if command is None else []},
    )
    app.callback()(_top)
    _add_plugin_commands(app, command)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tokenspeed {__version__}")
        raise typer.Exit


_Version = Annotated[
    bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version)
]


def _top(version: _Version = False) -> None:
    """Take the options that stand before any command."""


def _add_plugin_commands(app: typer.Typer, wanted: str | None) -> None:
    """Add the command that is wanted if a plugin brings it, else all that plugins bring, as their summaries have it."""
    from tokenspeed_core.plugins import Catalog, Selection
    from tokenspeed_core.plugins.selection import DEFAULTS

    try:
        catalog = Catalog.discover(check=False)
    except PluginError as error:
        if wanted is None:  # a command says so itself, where it matters to it
            typer.echo(f"tokenspeed: {error}", err=True)
        catalog = Catalog.discover(
            Selection(frozenset()), check=False
        )  # the default ones show what is wrong
    passing_all_on = {
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "help_option_names": [],
    }
    entries = sorted(catalog.entries("commands"), key=lambda entry: entry.name != "serve")
    for entry in [entry for entry in entries if entry.name == wanted] or entries:
        summary = str(metadata(entry.distribution).json.get("summary", "From")).partition(
            f"{entry.name}: "
        )
        described = f"{summary[2] or summary[0]} ({entry.distribution} {entry.version})"
        if "_TOKENSPEED_COMPLETE" in os.environ and entry.distribution in DEFAULTS:
            # The shell completes the flags of a command that is a SettingsCommand.
            command: Any = catalog.need(entry, object)
            if hasattr(command, "function"):
                app.command(entry.name, help=described)(command.function())
                continue
        app.command(entry.name, help=described, context_settings=passing_all_on)(
            _plugin_command(catalog, entry)
        )


def _plugin_command(catalog: Catalog, entry: Entry) -> Callable[[typer.Context], Any]:
    """Return what runs a command; a stranger's that raises anything but what is `_TOLD` ends in a PluginError."""
    from tokenspeed_core.plugins.catalog import make
    from tokenspeed_core.plugins.selection import DEFAULTS

    def run(context: typer.Context) -> Any:
        command: Any = catalog.need(entry, object)
        call = partial(command, list(context.args))
        return (
            call()
            if entry.distribution in DEFAULTS
            else make(entry, entry.value, call, object, _TOLD)
        )

    return run


def _explain_usage(error: Any, command: str | None) -> str:
    """Say what was mistyped, and the nearest thing that exists."""
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    message = str(error.format_message())
    if option is not None and context is not None and "such option" in message.lower():
        known = [
            form for each in context.command.params for form in each.opts if form.startswith("--")
        ]
        if "--max-model-len" in known:
            from tokenspeed_core.config.build import unknown

            return unknown(
                option.removeprefix("--").replace("-", "_"), option, known, context.command_path
            )
        return f"{option}: no such option" + (
            suggest(option, known) or f"; `{context.command_path} --help` lists them"
        )
    if command is not None and message.lower().startswith("no such command"):
        return _no_such(command)
    return message[:1].lower() + message[1:].rstrip(".")


def _explain_undecodable(error: UnicodeDecodeError) -> str:
    """Say whose entry points end the import of libraries that read those of all distributions. Raises any other."""
    from tokenspeed_core.plugins.metadata import metadata_folder

    for each in distributions():
        try:
            each.read_text("entry_points.txt")
        except UnicodeDecodeError:
            return f"{metadata_folder(each)} cannot be read, and what this needs reads it; `tokenspeed plugins doctor`"
    raise error


def _no_such(command: str) -> str:
    """Say which distribution brings a command, why an installed one may not be used, or the nearest name."""
    from tokenspeed_core.plugins import Catalog

    try:
        catalog = Catalog.discover(check=False)
        if catalog.is_installed("commands", command):
            catalog.get("commands", command)
    except PluginError as error:
        return str(error)
    if command in BROUGHT_BY:
        distribution = BROUGHT_BY[command]
        return f"{command}: {distribution} is not installed. Run `pip install {distribution}`."
    near = get_close_matches(command, catalog.names("commands"), n=1)
    hint = f"did you mean `tokenspeed {near[0]}`?" if near else "`tokenspeed --help` lists them"
    return f"{command}: no such command; {hint}"


def _say(message: str) -> int:
    typer.echo(f"tokenspeed: {printable(message)}", err=True)
    return USAGE_STATUS
