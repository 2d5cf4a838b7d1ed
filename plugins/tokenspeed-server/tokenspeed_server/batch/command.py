"""The command `tokenspeed run-batch`: its help, its own options, and the deferred import of its code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenspeed_core import TokenSpeedError
from tokenspeed_core.commands.settings import (
    ConfigFile,
    ModelArgument,
    SettingsCommand,
    configure,
    key_for_server,
    set_up_log,
)
from tokenspeed_server.settings import ServerConfig

CONCURRENCY = 256

OVERVIEW = (
    "tokenspeed run-batch IN.jsonl OUT.jsonl [MODEL] [OPTIONS]",
    "Answer the requests of a file in OpenAI's batch format, in this process or with a running server. "
    "Results are in the order of the lines.",
    (
        ("--url URL", "Send the requests to a running server."),
        ("--concurrency N", "Requests sent to --url at once; default: 256."),
        ("--overwrite", "Replace OUT.jsonl if it exists."),
        (
            "--config FILE",
            "Read settings from a YAML file; flags and the environment take precedence.",
        ),
    ),
)


class BatchError(TokenSpeedError):
    """The options of `run-batch` exclude each other."""


def run(
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="The requests.")],
    target: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="The results.")],
    *,
    positional: ModelArgument = None,
    url: Annotated[str | None, typer.Option("--url", help="a running server")] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", min=1, help="requests sent to --url at once")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT.jsonl if it exists.")
    ] = False,
    config: ConfigFile = None,
    flags: dict[str, Any],
) -> int:
    """Answer the requests of a file; return the exit status."""
    if url is not None:
        if positional is not None or config is not None or set(flags) - {"api_key"}:
            raise BatchError(
                "--url uses a running server. Remove MODEL, --config and the flags of serve."
            )
        from tokenspeed_server.batch import online

        key = key_for_server(flags.get("api_key"))
        at_once = concurrency or CONCURRENCY
        return online.run(url, key, source, target, overwrite=overwrite, concurrency=at_once)
    if concurrency is not None:
        raise BatchError("--concurrency needs --url. Without it, --max-num-seqs sets the limit.")
    configured = configure(ServerConfig, positional, flags, config)
    set_up_log(configured.log_level, configured.log_format, "batch")
    from tokenspeed_server.batch import offline

    return offline.run(configured, source, target, overwrite=overwrite)


def _load() -> Callable[..., int]:
    return run


run_batch = SettingsCommand(OVERVIEW, _load, ServerConfig)
