"""`tokenspeed serve`: from a configuration to a running server."""

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
from tokenspeed_server.generate import log_request
from tokenspeed_server.lifecycle import Launch, serve
from tokenspeed_server.listen import listen, url
from tokenspeed_server.service import ModelText, Options
from tokenspeed_server.subprocesses import Program
from tokenspeed_server.supervisor import Chief, Crew


def run(config: Config) -> int:
    """Serve a configuration until told to stop; return the exit status.

    Raises TokenSpeedError, in one line that says what to do, where it cannot start or the engine dies.
    """
    catalog = discover(config)
    hooks = Hooks.load(catalog)
    config = hooks.adjust_config(config)
    with ExitStack() as opened:
        logging.getLogger().setLevel(config.log_level.upper())
        bound, *others = map(
            opened.enter_context, listen(config.host, config.port, num_workers(config))
        )
        checkpoint = resolve_checkpoint(config, catalog)
        settled = config.resolved(
            model=str(checkpoint.path),
            served_model_name=config.served_model_name or checkpoint.name,
            api_workers=1 + len(others),
        )
        launch = _launch(
            settled, catalog, hooks, bound, checkpoint, partial(_announce, bound, settled)
        )
        engine = _program(ENGINE_MODULE, settled.resolved(api_key=None), catalog)
        return serve(
            launch, Chief(engine, [_program(__name__, settled, catalog, each) for each in others])
        )


def _program(
    module: str, config: Config, catalog: Catalog, listener: socket.socket | None = None
) -> Program:
    told = {"config": config.to_wire(), "catalog_digest": catalog.digest()}
    return Program((sys.executable, "-P", "-m", module), told, listener)


def main() -> int:
    """Be one more API worker: `serve.py PIPE`. Returns the exit status."""
    told, pipe = attach_to_parent(sys.argv[1:])
    logging.disable()  # what there is to say about the start the first worker says
    try:
        config, catalog = discover_in_subprocess(told)
        launch = _launch(
            config,
            catalog,
            Hooks.load(catalog),
            socket.socket(fileno=told["listen_fds"][0]),
            resolve_checkpoint(config, catalog),
            lambda text: logging.disable(logging.NOTSET),
        )
        return serve(launch, Crew(told["worker"], told["addresses"][told["worker"]], pipe))
    except EngineDeadError:
        return 1  # the first worker says why
    except TokenSpeedError as error:
        print(f"tokenspeed: {error}", file=sys.stderr)
        return 1


def _launch(
    config: Config,
    catalog: Catalog,
    hooks: Hooks,
    bound: socket.socket,
    checkpoint: ResolvedCheckpoint,
    on_ready: Callable[[ModelText], None],
) -> Launch:
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
    return Launch(
        bound,
        options,
        partial(_load_text, config, checkpoint),
        config.log_level_http or config.log_level,
        on_ready,
        wrap=hooks.add_middleware,
    )


def _load_text(config: Config, checkpoint: ResolvedCheckpoint) -> ModelText:
    """Load the tokenizer, the chat template and the model's own sampling. Raises CheckpointError."""
    defaults = Defaults.of(checkpoint.generation, checkpoint.info.eos_token_ids)
    return ModelText(*load_text(config, checkpoint.path), defaults)


def _announce(bound: socket.socket, config: Config, text: ModelText) -> None:
    """Say where the server is and how to try it, in a line that can be pasted."""
    base, name, is_chat = url(bound), config.served_model_name, text.template is not None
    body = {"model": name} | (
        {"messages": [{"role": "user", "content": "Hello!"}]}
        if is_chat
        else {"prompt": [1, 2, 3] if text.tokenizer is None else "WorkerReady"}
    )
    route = "chat/completions" if is_chat else "completions"
    key = "" if config.api_key is None else " -H 'Authorization: Bearer YOUR_KEY'"
    with suppress(
        OSError
    ):  # who reads this may have gone, or the disk may be full; the server stays
        print(
            f"TokenSpeed serves {name} at {base}\n"
            f"  curl {base}/v1/{route} -H 'Content-Type: application/json'{key} -d {shlex.quote(json.dumps(body))}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
