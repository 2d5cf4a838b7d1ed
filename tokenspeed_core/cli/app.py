"""Builds the command line, and turns errors into one line and an exit status."""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import metadata
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenspeed_core import __version__
from tokenspeed_core.errors import PluginError, TokenSpeedError, printable, suggest

if TYPE_CHECKING:
    from tokenspeed_core.plugins import Catalog, Entry

# click's UsageError; newer releases of typer bundle click.
UsageError: Any = typer.BadParameter.__mro__[1]
USAGE_STATUS = 2
# One-dash flags of other engines.
SHORT_FORMS = {
    "-tp": "tensor-parallel-size",
    "-dp": "data-parallel-size",
    "-ep": "enable-expert-parallel",
    "-pp": "pipeline-parallel-size",
    "-n": "nnodes",
    "-r": "node-rank",
    "-q": "quantization",
    "-O": "optimization-level",
    "-sc": "speculative-config",
    "-cc": "compilation-config",
}
# Exceptions of a plugin's command that `main` handles.
_HANDLED = (UsageError, TokenSpeedError, typer.Exit, typer.Abort, BrokenPipeError, SystemExit)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `tokenspeed` with these arguments (by default `sys.argv[1:]`); return the exit status."""
    try:
        return _run(arguments)
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                # The pipe is closed or the disk is full. Python would exit with another status.
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if arguments is None and "triton" not in sys.modules:
            # The process ends now. Python would search all objects of torch for garbage first, for half a second.
            # Triton would report the objects that are not freed as leaks.
            gc.freeze()


def _run(arguments: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    command = None if words[0].startswith("-") else words[0]
    try:
        app = build(command)
        status = app(words, prog_name="tokenspeed", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except UsageError as error:
        message = _explain_usage(error, command, words)
        if "--json" in words:
            typer.echo(json.dumps({"error": message}, indent=2, ensure_ascii=False))
        return _fail(message)
    except TokenSpeedError as error:
        is_debug = os.environ.get("TOKENSPEED_LOG_LEVEL", "").lower() == "debug"
        if is_debug or logging.root.isEnabledFor(logging.DEBUG):
            typer.echo(printable(traceback.format_exc()), err=True)
        return _fail(str(error))
    except typer.Exit as error:
        return error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        return 141


def build(command: str | None) -> typer.Typer:
    """Build the command line with the requested command, or with all commands if None.

    Only without a command, typer adds options for help and completion: it checks their values with
    pydantic, and importing pydantic takes longer than most commands.
    """
    app = typer.Typer(
        name="tokenspeed",
        help="An inference engine for large language models, built from plugins.",
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
    """Take the options before any command."""


def _add_plugin_commands(app: typer.Typer, wanted: str | None) -> None:
    """Add the wanted command if a plugin provides it, else all commands of plugins."""
    from tokenspeed_core.plugins import Catalog, Selection
    from tokenspeed_core.plugins.selection import DEFAULTS

    try:
        catalog = Catalog.discover(check=False)
    except PluginError as error:
        # Commands report this error themselves; the default commands are needed to fix it.
        if wanted is None:
            typer.echo(f"tokenspeed: {error}", err=True)
        catalog = Catalog.discover(Selection(frozenset()), check=False)
    pass_through = {
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "help_option_names": [],
    }
    entries = sorted(catalog.entries("commands"), key=lambda entry: entry.name != "serve")
    for entry in [entry for entry in entries if entry.name == wanted] or entries:
        help_text = f"{_summary(entry)} ({entry.distribution} {entry.version})"
        if "_TOKENSPEED_COMPLETE" in os.environ and entry.distribution in DEFAULTS:
            # The shell completes the flags of a SettingsCommand.
            command: Any = catalog.need(entry, object)
            if hasattr(command, "function"):
                app.command(entry.name, help=help_text)(command.function())
                continue
        app.command(entry.name, help=help_text, context_settings=pass_through)(
            _plugin_command(catalog, entry)
        )


def _summary(entry: Entry) -> str:
    """Return the distribution's summary, from "NAME: " on if it describes several commands."""
    summary = str(metadata(entry.distribution).json.get("summary", "From"))
    before, _, own = summary.partition(f"{entry.name}: ")
    return own or before


def _plugin_command(catalog: Catalog, entry: Entry) -> Callable[[typer.Context], Any]:
    """Return a function that runs a command. Unexpected exceptions of third parties become PluginError."""
    from tokenspeed_core.plugins.catalog import make
    from tokenspeed_core.plugins.selection import DEFAULTS

    def run(context: typer.Context) -> Any:
        command: Any = catalog.need(entry, object)
        call = partial(command, list(context.args))
        if entry.distribution in DEFAULTS:
            return call()
        return make(entry, entry.value, call, object, _HANDLED)

    return run


def _explain_usage(error: Any, command: str | None, words: Sequence[str]) -> str:
    """Return a message about a usage error, with the nearest existing name."""
    option = getattr(error, "option_name", None)
    context = getattr(error, "ctx", None)
    message = str(error.format_message())
    if option is not None and context is not None and "such option" in message.lower():
        # click reads -tp as -t -p.
        typed = [word for word in words if word.startswith(option)]
        return _unknown_option(
            option if option.startswith("--") or not typed else typed[0], context
        )
    if command is not None and message.lower().startswith("no such command"):
        return _unknown_command(command)
    return message[:1].lower() + message[1:].rstrip(".")


def _unknown_option(option: str, context: Any) -> str:
    known = [form for each in context.command.params for form in each.opts if form.startswith("--")]
    if "--max-model-len" in known and option.startswith("--"):
        from tokenspeed_core.config import Config
        from tokenspeed_core.config.build import unknown

        name = option.removeprefix("--").replace("-", "_")
        return unknown(Config, name, option, known, context.command_path)
    if option == "-v":
        return "-v: use `tokenspeed --version`, or --log-level debug for more messages"
    if "--max-model-len" in known and option in SHORT_FORMS:
        from tokenspeed_core.config.flag_aliases import alias_hint

        form = f"--{SHORT_FORMS[option]}"
        return f"{option}: {f'write {form}' if form in known else alias_hint(SHORT_FORMS[option])}"
    hint = suggest(option, known) or f"; `{context.command_path} --help` lists the options"
    return f"{option}: no such option{hint}"


def _unknown_command(command: str) -> str:
    """Return why a command does not exist, and how to get it."""
    from tokenspeed_core.plugins import Catalog
    from tokenspeed_core.plugins.kinds import COMMANDS

    try:
        catalog = Catalog.discover(check=False)
        if catalog.is_installed("commands", command):
            catalog.get("commands", command)
    except PluginError as error:
        return str(error)
    if command in COMMANDS:
        distribution = COMMANDS[command]
        return f"{command}: {distribution} is not installed. Run `pip install {distribution}`."
    hint = suggest(command, catalog.names("commands")) or "; `tokenspeed --help` lists them"
    return f"{command}: no such command{hint}"


def _fail(message: str) -> int:
    typer.echo(f"tokenspeed: {printable(message)}", err=True)
    return USAGE_STATUS
