"""`tokenspeed serve`: from a configuration to a running server."""

from __future__ import annotations

import json
import shlex
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from tokenspeed_core.checkpoint import ResolvedCheckpoint, resolve_checkpoint
from tokenspeed_core.config import Config
from tokenspeed_core.engine.launch import discover
from tokenspeed_core.plugins.hooks import Hooks
from tokenspeed_core.plugins.hookspecs import RequestRecord
from tokenspeed_core.requests import Defaults
from tokenspeed_core.server.generate import log_request
from tokenspeed_core.server.lifecycle import Launch, serve
from tokenspeed_core.server.listen import listen, url
from tokenspeed_core.server.service import ModelText, Options, Service
from tokenspeed_core.text import load_text
from tokenspeed_core.text.parsers import find_parsers

INTERRUPTED = 130


def run(config: Config) -> int:
    """Serve a configuration until told to stop; return the exit status.

    Raises TokenSpeedError, in one line that says what to do, where it cannot start or the engine dies.
    """
    bound = listen(config.host, config.port)
    try:
        catalog = discover(config)
        hooks = Hooks.load(catalog)
        config = hooks.adjust(config)
        checkpoint = resolve_checkpoint(config, catalog)
        options = Options(
            model_name=config.served_model_name or checkpoint.name,
            api_key=config.api_key,
            stream_interval=config.stream_interval,
            reports_cached_tokens=config.enable_cache_report,
            has_priorities=config.schedule_policy != "fcfs",
            observers=_observers(config, hooks),
            parsers=find_parsers(config, catalog),
        )
        for_engine = config.resolved(model=str(checkpoint.path), api_key=None)
        return serve(Launch(
            socket=bound,
            options=options,
            load_text=partial(_load_text, config, checkpoint),
            engine_config=for_engine.to_wire(),
            catalog_digest=catalog.digest(),
            log_level=config.log_level_http or config.log_level,
            on_ready=partial(_announce, bound),
            wrap=hooks.add_middleware,
        ))
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        bound.close()


def _observers(config: Config, hooks: Hooks) -> tuple[Callable[[RequestRecord], None], ...]:
    """Return who hears of each request that ended."""
    log = (log_request,) if config.enable_log_requests else ()
    return (*log, hooks.observe_request) if hooks.has("observe_request") else log


def _load_text(config: Config, checkpoint: ResolvedCheckpoint) -> ModelText:
    """Load the tokenizer, the chat template and the model's own sampling. Raises CheckpointError."""
    defaults = Defaults.of(checkpoint.generation, checkpoint.info.eos_token_ids)
    return ModelText(*load_text(config, checkpoint.path), defaults)


def _announce(bound: socket.socket, service: Service) -> None:
    """Say where the server is and how to try it, in a line that can be pasted."""
    base, options = url(bound), service.options
    serving = service.serving
    is_chat = serving is not None and serving.text.template is not None
    has_text = serving is not None and serving.text.tokenizer is not None
    body = {"model": options.model_name} | (
        {"messages": [{"role": "user", "content": "Hello!"}]} if is_chat
        else {"prompt": "Hello" if has_text else [1, 2, 3]}
    )
    route = "chat/completions" if is_chat else "completions"
    key = "" if options.api_key is None else " -H 'Authorization: Bearer YOUR_KEY'"
    with suppress(OSError):  # who reads this may have gone, or the disk may be full; the server stays
        print(
            f"TokenSpeed serves {options.model_name} at {base}\n"
            f"  curl {base}/v1/{route} -H 'Content-Type: application/json'{key} -d {shlex.quote(json.dumps(body))}",
            flush=True,
        )
