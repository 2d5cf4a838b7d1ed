"""From a configuration to a running server; as a module, one more API worker of a server."""

from __future__ import annotations

import gc
import logging
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tokenspeed_core import __version__
from tokenspeed_core.commands import Catalog
from tokenspeed_core.commands.serving import (
    EngineDeadError,
    Hooks,
    LogitsProcessorTable,
    ModelText,
    Program,
    ResolvedCheckpoint,
    TokenSpeedError,
    attach_to_parent,
    discover,
    discover_in_subprocess,
    engine_programs,
    resolve,
    resolve_checkpoint,
    run_node,
)
from tokenspeed_server.access import default_hosts, is_loopback
from tokenspeed_server.announce import announce
from tokenspeed_server.connections import ConnectionLimits, raise_file_limit
from tokenspeed_server.isolated_template import IsolatedTemplate
from tokenspeed_server.lifecycle import WorkerConfig, serve
from tokenspeed_server.listen import check_address, listen
from tokenspeed_server.metrics import MetricsMemory
from tokenspeed_server.observability import Observability
from tokenspeed_server.replicas.memory import ReplicaMemory
from tokenspeed_server.reply_parsers import describe_parsers, find_parsers, model_traits
from tokenspeed_server.responses_api.store import forget_path, shared_file
from tokenspeed_server.service import Options
from tokenspeed_server.settings import ServerConfig
from tokenspeed_server.statistics import EngineMonitors
from tokenspeed_server.supervisor import Supervised, Supervisor
from tokenspeed_server.unix_socket import listen_unix

MAX_RESTARTS = 5
RESTART_SECONDS = 600.0  # in which that many restarts are allowed

log = logging.getLogger("tokenspeed.serve")


def run(config: ServerConfig) -> int:
    """Serve until interrupted; return the exit status.

    Raises TokenSpeedError when the server cannot start or the engine dies.
    """
    catalog = discover(config)
    hooks = Hooks.load(catalog)
    config = hooks.adjust_config(config)
    if config.node_rank:
        resolved = resolve(config, catalog)
        path = str(resolved.checkpoint.path)
        return run_node(resolved.config.for_engine().resolved(model=path), catalog)
    restarts = Restarts()
    while True:
        try:
            return _run_once(config, catalog, hooks, restarts)
        except EngineDeadError as error:
            port = restarts.next_port(config.restart_engine)
            if port is None:
                raise
            log.error("%s; the server restarts", error)
            config = config.resolved(port=port)
            gc.unfreeze()  # the objects of the previous run can be collected


def _run_once(config: ServerConfig, catalog: Catalog, hooks: Hooks, restarts: Restarts) -> int:
    with ExitStack() as opened:
        logging.getLogger().setLevel(config.log_level.upper())
        find_parsers(config, catalog)  # wrong names are reported before the port is tried
        raise_file_limit()
        bound, *others = map(opened.enter_context, _listen(config, opened))
        _warn_if_open(config)
        checkpoint = resolve_checkpoint(config, catalog)
        log.info("TokenSpeed %s is starting %s", __version__, checkpoint.name)
        settled = config.resolved(
            model=str(checkpoint.path),  # the other processes read the downloaded directory
            served_model_name=config.served_model_name or checkpoint.name,
            api_workers=1 + len(others),
        )
        store = opened.enter_context(shared_file()) if others else None
        memory = MetricsMemory(1 + len(others)) if settled.enable_metrics else None
        num_engines = settled.data_parallel_size
        replicas = ReplicaMemory(1 + len(others), num_engines)

        def on_ready(text: ModelText) -> None:
            if store is not None:
                forget_path(store)  # the engine is ready when all workers are
            restarts.port = config.port if config.uds else bound.getsockname()[1]
            announce(bound, settled, text)

        worker = _worker_config(settled, catalog, hooks, bound, checkpoint, on_ready, store)
        observability = _observability(settled, memory, 0)
        if settled.decode_log_interval:
            observability.monitor.log_every(settled.decode_log_interval)
        worker = replace(worker, observability=observability)
        engines = engine_programs(settled, catalog)
        workers = [
            _worker_program(settled, catalog, each, memory, replicas, response_store=str(store))
            for each in others
        ]
        may_restart = config.restart_engine and settled.parallel_sizes().num_sharing == 1
        supervisor = Supervisor(
            engines, workers, replicas, lambda: may_restart and restarts.count_one()
        )
        return serve(worker, supervisor)


class Restarts:
    """When to start again after the engine or an API worker died."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without restarts."""
        self.port: int | None = None  # of the run that became ready
        self._clock = clock
        self._times: list[float] = []

    def next_port(self, is_allowed: bool) -> int | None:
        """Return the port for the next run; None if there should be none.

        A server that did not become ready would fail again, and so would one that failed often.
        """
        port, self.port = self.port, None
        return port if is_allowed and self.count_one() else None

    def count_one(self) -> bool:
        """Count a restart, of the server or of one of its engines. Return whether it is allowed."""
        now = self._clock()
        self._times = [each for each in self._times if now - each < RESTART_SECONDS]
        if len(self._times) >= MAX_RESTARTS:
            return False
        self._times.append(now)
        return True


def _warn_if_open(config: ServerConfig) -> None:
    if config.api_key is None and config.uds is None and not is_loopback(config.host):
        log.warning(
            "%s is reachable from other machines and needs no API key: anyone who can connect may use it. "
            "Set --api-key, or listen on 127.0.0.1.",
            config.host,
        )


def _listen(config: ServerConfig, opened: ExitStack) -> list[socket.socket]:
    """Return the listening sockets of the API workers. Raises ConfigError and CapacityError."""
    check_address(config)
    count = config.num_workers()
    if config.uds is None:
        return listen(config.host, config.port, count)
    return opened.enter_context(listen_unix(config.uds, count))


def main() -> int:
    """Be a secondary API worker: `serve.py PIPE`. Return the exit status."""
    data, pipe = attach_to_parent(sys.argv[1:])
    logging.disable()  # the first worker logs the start
    try:
        number = data["worker"]
        config, catalog = discover_in_subprocess(ServerConfig, data, f"server-{number}")
        worker = _worker_config(
            config,
            catalog,
            Hooks.load(catalog),
            socket.socket(fileno=data["listen_fds"][0]),
            resolve_checkpoint(config, catalog),
            lambda text: logging.disable(logging.NOTSET),
            Path(data["response_store"]),
        )
        memory, num_workers = None, config.api_workers or 1
        if data["metrics_fd"] is not None:
            memory = MetricsMemory(num_workers, data["metrics_fd"])
        replicas = ReplicaMemory(num_workers, config.data_parallel_size, data["replicas_fd"])
        worker = replace(worker, observability=_observability(config, memory, number))
        return serve(worker, Supervised(number, data["addresses"], pipe, replicas))
    except EngineDeadError:
        return 1  # the first worker reports it
    except TokenSpeedError as error:
        print(f"tokenspeed: {error}", file=sys.stderr)
        return 1


def _worker_program(
    config: ServerConfig,
    catalog: Catalog,
    listener: socket.socket,
    memory: MetricsMemory | None,
    replicas: ReplicaMemory,
    **more: str,
) -> Program:
    data: dict[str, Any] = {"config": config.to_wire(), "catalog_digest": catalog.digest(), **more}
    data["metrics_fd"] = None if memory is None else memory.fd
    data["replicas_fd"] = replicas.fd
    shared = [replicas.fd] if memory is None else [replicas.fd, memory.fd]
    return Program((sys.executable, "-P", "-m", __name__), data, listener, shared)


def _observability(
    config: ServerConfig, memory: MetricsMemory | None, worker: int
) -> Observability:
    if memory is None:
        return Observability(EngineMonitors(config.data_parallel_size))
    assert config.served_model_name is not None
    return Observability.with_metrics(
        memory,
        worker,
        config.served_model_name,
        has_prometheus="prometheus" in config.metrics_reporters,
        num_engines=config.data_parallel_size,
    )


def _worker_config(
    config: ServerConfig,
    catalog: Catalog,
    hooks: Hooks,
    bound: socket.socket,
    checkpoint: ResolvedCheckpoint,
    on_ready: Callable[[ModelText], None],
    response_store: Path | None,
) -> WorkerConfig:
    options = make_options(config, catalog, hooks, checkpoint, response_store)
    return WorkerConfig(
        bound,
        options,
        partial(load_model_text, config, checkpoint),
        config.log_level_http or config.log_level,
        on_ready,
        wrap=hooks.add_middleware,
        certificate=config.ssl_certfile,
        key=config.ssl_keyfile,
        connections=_connection_limits(config),
    )


def make_options(
    config: ServerConfig,
    catalog: Catalog,
    hooks: Hooks,
    checkpoint: ResolvedCheckpoint,
    response_store: Path | None = None,
) -> Options:
    """Return how to answer requests, from a configuration with the model's name."""
    assert config.served_model_name is not None
    parsers = find_parsers(config, catalog, model_traits(config, checkpoint))
    log.info("%s", describe_parsers(config, parsers))
    observer = hooks.observer("observe_request")
    return Options(
        model_name=config.served_model_name,
        api_key=config.api_key,
        stream_interval=config.stream_interval,
        reports_cached_tokens=config.enable_cache_report,
        has_priorities=config.schedule_policy != "fcfs",
        observers=() if observer is None else (observer,),
        request_log_level=config.log_requests_level if config.enable_log_requests else None,
        parsers=parsers,
        processors=LogitsProcessorTable.of(config, catalog),
        response_store=response_store,
        unknown_fields=config.unknown_fields,
        created=int(checkpoint.path.stat().st_mtime),
        root_path=config.root_path or "",
        allowed_origins=config.allowed_origins,
        allowed_hosts=_allowed_hosts(config),
        max_body_bytes=config.max_body_bytes,
        max_body_values=config.max_body_values,
        max_sequences=config.max_sequences_per_request,
        max_unsent_bytes=config.max_unsent_bytes,
        request_timeout=config.request_timeout,
        drain_timeout=config.drain_timeout,
    )


def _connection_limits(config: ServerConfig) -> ConnectionLimits:
    """Return the limits of one API worker; the workers share the connections."""
    return ConnectionLimits(
        max(1, config.max_connections // (config.api_workers or 1)),
        config.max_header_bytes,
        config.request_receive_timeout,
        config.send_timeout,
    )


def _allowed_hosts(config: ServerConfig) -> tuple[str, ...]:
    """Return the host names that clients may use. Pages of other sites cannot know an API key."""
    if config.allowed_hosts or config.api_key or config.uds is not None:
        return config.allowed_hosts
    return default_hosts(config.host)


def load_model_text(config: ServerConfig, checkpoint: ResolvedCheckpoint) -> ModelText:
    """Load the tokenizer, the chat template in its own process, and the default sampling. Raises CheckpointError."""
    text = ModelText.load(config, checkpoint)
    if text.template is None:
        return text
    return replace(text, template=IsolatedTemplate(text.template))


if __name__ == "__main__":
    sys.exit(main())
