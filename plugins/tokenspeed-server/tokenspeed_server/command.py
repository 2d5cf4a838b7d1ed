"""The command `tokenspeed serve`: its help, its own options, and the start of the server."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from tokenspeed_core.commands.settings import (
    ConfigFile,
    ModelArgument,
    SettingsCommand,
    configure,
    set_up_log,
)
from tokenspeed_server.settings import ServerConfig

OVERVIEW = (
    "tokenspeed serve [MODEL] [OPTIONS]",
    "Serve MODEL (a path or Hugging Face repo id) over the OpenAI HTTP API; default: the bundled demo.",
    (
        (
            "--config FILE",
            "Read settings from a YAML file; flags and the environment take precedence.",
        ),
        ("--dry-run", "Show model, plugins, kernels and memory without loading weights."),
    ),
)


def run(
    *,
    positional: ModelArgument = None,
    config: ConfigFile = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="show the resolved configuration without loading weights"),
    ] = False,
    flags: dict[str, Any],
) -> int:
    """Serve until interrupted; return the exit status."""
    configured = configure(ServerConfig, positional, flags, config)
    set_up_log(configured.log_level, configured.log_format, "server")
    if dry_run:
        from tokenspeed_server import dry_run as report

        typer.echo(report.dry_run(configured))
        return 0
    if sys.stderr.isatty():  # imports take a second; the next line replaces this one
        print("starting ...", end="\r", file=sys.stderr, flush=True)
    from tokenspeed_server import serve

    return serve.run(configured)


def _load() -> Callable[..., int]:
    return run


serve = SettingsCommand(OVERVIEW, _load, ServerConfig)
