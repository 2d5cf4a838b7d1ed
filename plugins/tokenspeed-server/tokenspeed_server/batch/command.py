"""The command `tokenspeed run-batch`: its help, its own options, and what to import when it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenspeed_core.commands.settings import (
    ConfigFile,
    ModelArgument,
    SettingsCommand,
    configure,
    set_up_log,
)

OVERVIEW = (
    "tokenspeed run-batch IN.jsonl OUT.jsonl [MODEL] [OPTIONS]",
    "Answer the requests of a file in OpenAI's batch format, without a server. Results are in the "
    "order of the lines.",
    (
        ("--overwrite", "replace OUT.jsonl if it exists"),
        (
            "--config FILE",
            "read settings from a YAML file; flags and the environment take precedence",
        ),
    ),
)


def run(
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="The requests.")],
    target: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="The results.")],
    *,
    positional: ModelArgument = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT.jsonl if it exists.")
    ] = False,
    config: ConfigFile = None,
    flags: dict[str, Any],
) -> int:
    """Answer the requests of a file; return the exit status."""
    configured = configure(positional, flags, config)
    set_up_log(configured.log_level, configured.log_format, "batch")
    from tokenspeed_server.batch import offline

    return offline.run(configured, source, target, overwrite=overwrite)


def _load() -> Callable[..., int]:
    return run


run_batch = SettingsCommand(OVERVIEW, _load)
