"""From a configuration to a running server; as a module, one more API worker of a server."""

from __future__ import annotations

import json
import logging
import shlex
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial

from tokenspeed_core.commands import Catalog
from tokenspeed_core.commands.serving import (
    ENGINE_MODULE,
    Defaults,
    EngineDeadError,
    Hooks,
    ResolvedCheckpoint,
    TokenSpeedError,
    attach_to_parent,
    discover,
    discover_in_subprocess,
    find_parsers,
    load_text,
    num_workers,
    resolve_checkpoint,
)
from tokenspeed_core.commands.settings import Config
from tokenspeed_server.lifecycle import WorkerConfig, serve
from tokenspeed_server.listen import listen, url
from tokenspeed_server.responses import log_request
from tokenspeed_server.service import ModelText, Options
from tokenspeed_server.subprocesses import Program
from tokenspeed_server.supervisor import Supervised, Supervisor


def run(config: Config) -> int:
    """Serve until interrupted; return the exit status.

    Raises TokenSpeedError when the server cannot start or the engine dies.
    """
    catalog = discover(config)
    hooks = Hooks.load(catalog)
    config = hooks.adjust_config(config)
    with ExitStack() as opened:
        logging.getLogger().setLevel(config.log_level.upper())
        find_parsers(config, catalog)  # wrong names are reported before the port is tried
        sockets = listen(config.host, config.port, num_workers(config))
        bound, *others = map(opened.enter_context, sockets)
        checkpoint = resolve_checkpoint(config, catalog)
        settled = config.resolved(
            # The other processes read the downloaded directory.
            model=str(checkpoint.path),
            revision=None,
            download_dir=None,
            served_model_name=config.served_model_name or checkpoint.name,
            api_workers=1 + len(others),
        )
        worker = _worker_config(
            settled, catalog, hooks, bound, checkpoint, partial(_announce, bound, settled)
        )
        engine = _program(ENGINE_MODULE, settled.resolved(api_key=None), catalog)
        workers = [_program(__name__, settled, catalog, each) for each in others]
        return serve(worker, Supervisor(engine, workers))


def main() -> int:
    """Be a secondary API worker: `serve.py PIPE`. Return the exit status."""
    data, pipe = attach_to_parent(sys.argv[1:])
    logging.disable()  # the first worker logs the start
    try:
        config, catalog = discover_in_subprocess(data)
        worker = _worker_config(
            config,
            catalog,
            Hooks.load(catalog),
            socket.socket(fileno=data["listen_fds"][0]),
            resolve_checkpoint(config, catalog),
            lambda text: logging.disable(logging.NOTSET),
        )
        number = data["worker"]
        return serve(worker, Supervised(number, data["addresses"][number], pipe))
    except EngineDeadError:
        return 1  # the first worker reports it
    except TokenSpeedError as error:
        print(f"tokenspeed: {error}", file=sys.stderr)
        return 1


def _program(
    module: str, config: Config, catalog: Catalog, listener: socket.socket | None = None
) -> Program:
    data = {"config": config.to_wire(), "catalog_digest": catalog.digest()}
    return Program((sys.executable, "-P", "-m", module), data, listener)


def _worker_config(
    config: Config,
    catalog: Catalog,
    hooks: Hooks,
    bound: socket.socket,
    checkpoint: ResolvedCheckpoint,
    on_ready: Callable[[ModelText], None],
) -> WorkerConfig:
    assert config.served_model_name is not None
    observers = (
        log_request if config.enable_log_requests else None,
        hooks.observer("observe_request"),
    )
    options = Options(
        model_name=config.served_model_name,
        api_key=config.api_key,
        stream_interval=config.stream_interval,
        reports_cached_tokens=config.enable_cache_report,
        has_priorities=config.schedule_policy != "fcfs",
        observers=tuple(filter(None, observers)),
        parsers=find_parsers(config, catalog),
    )
    return WorkerConfig(
        bound,
        options,
        partial(_load_text, config, checkpoint),
        config.log_level_http or config.log_level,
        on_ready,
        wrap=hooks.add_middleware,
    )


def _load_text(config: Config, checkpoint: ResolvedCheckpoint) -> ModelText:
    """Load the tokenizer, the chat template and the default sampling. Raises CheckpointError."""
    defaults = Defaults.of(checkpoint.generation, checkpoint.info.eos_token_ids)
    return ModelText(*load_text(config, checkpoint.path), defaults)


def _announce(bound: socket.socket, config: Config, text: ModelText) -> None:
    """Print the server's address and a command to try it."""
    base = url(bound)
    body: dict[str, object] = {"model": config.served_model_name}
    if text.template is not None:
        route = "chat/completions"
        body["messages"] = [{"role": "user", "content": "Hello!"}]
    else:
        route = "completions"
        body["prompt"] = [1, 2, 3] if text.tokenizer is None else "Hello"
    key = "" if config.api_key is None else " -H 'Authorization: Bearer YOUR_KEY'"
    with suppress(OSError):  # stdout may be closed, or a file on a full disk
        print(
            f"TokenSpeed serves {config.served_model_name} at {base}\n"
            f"  curl {base}/v1/{route} -H 'Content-Type: application/json'{key} "
            f"-d {shlex.quote(json.dumps(body))}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
