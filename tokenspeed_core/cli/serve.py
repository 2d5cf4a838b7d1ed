"""`tokenspeed serve`: resolve the configuration, then hand over to the server."""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from tokenspeed_core.config import Config
from tokenspeed_core.config.sources import load
from tokenspeed_core.errors import ConfigError
from tokenspeed_core.plugins.entry import load_target

ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help="the same as --model")]
ConfigFile = Annotated[
    str | None, typer.Option("--config", metavar="FILE", help="YAML file of settings")
]


OVERVIEW = (
    "tokenspeed serve [MODEL] [OPTIONS]",
    "Serve MODEL (a path or Hugging Face repo id) over the OpenAI HTTP API; none: the bundled demo.",
    (
        ("--config FILE", "read settings from a YAML file; flags and the environment go first"),
        ("--dry-run", "resolve model, plugins, kernels and memory, load nothing"),
    ),
)


def configure(positional: str | None, flags: dict[str, Any], file: str | None) -> Config:
    """Return the configuration of a command line. Raises ConfigError."""
    if positional is not None:
        if flags.get("model", positional) != positional:
            raise ConfigError(
                f"--model {flags['model']}: the model was given twice, first as {positional}"
            )
        flags = {**flags, "model": positional}
    return load(flags, os.environ, file)


def serve(
    *,
    positional: ModelArgument = None,
    config: ConfigFile = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="resolve everything, load nothing")
    ] = False,
    flags: dict[str, Any],
) -> int:
    """Serve until told to stop; return the exit status."""
    asked = configure(positional, flags, config)
    logging.basicConfig(level=asked.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    if dry_run:
        from tokenspeed_core.engine.factory import dry_run as explain

        typer.echo(explain(asked))
        return 0
    if find_spec("tokenspeed_server") is None:
        raise ConfigError(
            "serve: tokenspeed-server is not installed; pip install tokenspeed-server"
        )
    status: int = load_target("tokenspeed_server.serve:run")(asked)
    return status
