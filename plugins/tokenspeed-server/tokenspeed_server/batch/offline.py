"""The engine and the application of a batch, in the order of a server's start, without a socket."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from tokenspeed_core.commands.serving import (
    ConfigError,
    EngineDeadError,
    Hooks,
    Program,
    WorkerReady,
    discover,
    engine_program,
    resolve_checkpoint,
)
from tokenspeed_core.commands.settings import Config
from tokenspeed_server.app import create_app
from tokenspeed_server.batch.lines import count_lines, read_lines
from tokenspeed_server.batch.runner import BatchRunner, Counts
from tokenspeed_server.replicas.engines import EngineReplicas
from tokenspeed_server.reply_parsers import find_parsers
from tokenspeed_server.serve import load_model_text, make_options
from tokenspeed_server.service import ModelText, Options, Service
from tokenspeed_server.supervisor import Supervisor

INTERRUPTED = 130  # the exit status after Ctrl-C
LINE_OVERHEAD = 4096  # bytes of a line around its body

_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


def run(config: Config, source: Path, target: Path, *, overwrite: bool) -> int:
    """Answer the requests of a file; return the exit status: 0 if all succeeded, 1 if some failed.

    Raises ConfigError for wrong paths, and TokenSpeedError when the engine cannot start or dies.
    """
    _check_paths(source, target, overwrite)
    catalog = discover(config)
    hooks = Hooks.load(catalog)
    config = hooks.adjust_config(config)
    find_parsers(config, catalog)
    checkpoint = resolve_checkpoint(config, catalog)
    settled = config.resolved(
        model=str(checkpoint.path),
        revision=None,
        download_dir=None,
        served_model_name=config.served_model_name or checkpoint.name,
        api_workers=1,
        api_key=None,
    )
    options = replace(make_options(settled, catalog, hooks, checkpoint), logs_exchanges=False)
    batch = Batch(
        [engine_program(settled, catalog, each) for each in range(settled.data_parallel_size)],
        options,
        hooks,
        concurrency=2 * settled.max_num_seqs * settled.data_parallel_size,
    )
    with readable_write_errors(target), ExitStack() as opened:
        try:
            reading = opened.enter_context(source.open("rb"))
            writing = opened.enter_context(target.open("wb" if overwrite else "xb"))
        except OSError as error:
            raise ConfigError(f"{error.filename}: {error.strerror}") from error
        is_whole = asyncio.run(
            batch.run(lambda: load_model_text(settled, checkpoint), reading, writing)
        )
    return _report(batch.counts, target, is_whole)


@contextmanager
def readable_write_errors(target: Path) -> Iterator[None]:
    """Raise ConfigError if the results do not fit on the disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        reason = os.strerror(error.errno or 0)
        raise ConfigError(f"{target}: {reason}. The results are incomplete.") from error


def _check_paths(source: Path, target: Path, overwrite: bool) -> None:
    """Raise ConfigError for paths that cannot work, before the model is loaded."""
    if not source.is_file():
        what = "is a folder" if source.is_dir() else "does not exist"
        raise ConfigError(f"{source} {what}. Give a file with one request per line.")
    if not target.parent.is_dir():
        raise ConfigError(f"the folder of {target} does not exist. Make it, or choose another.")
    if target.is_dir():
        raise ConfigError(f"{target} is a folder. Give a file for the results.")
    if target.exists() and source.samefile(target):
        raise ConfigError(f"{target} is both input and output. Choose another output.")
    if target.exists() and not overwrite:
        raise ConfigError(f"{target} exists. Choose another file, or add --overwrite.")
    if not os.access(target.parent, os.W_OK):
        raise ConfigError(f"no permission to write to {target.parent}.")


def _report(counts: Counts, target: Path, is_whole: bool) -> int:
    num_results = counts.num_answered + counts.num_failed
    summary = f"{num_results} results in {target}: {counts.num_failed} failed"
    if not is_whole:
        summary = f"interrupted; {summary}, and the other lines have no result"
    with suppress(OSError):  # stderr may be closed
        print(f"tokenspeed: {summary}", file=sys.stderr, flush=True)
    if not is_whole:
        return INTERRUPTED
    return 1 if counts.num_failed else 0


class Batch:
    """The processes of one batch."""

    def __init__(
        self, programs: Sequence[Program], options: Options, hooks: Hooks, *, concurrency: int
    ) -> None:
        self.counts = Counts()
        self._programs = programs
        self._options = options
        self._hooks = hooks
        self._concurrency = concurrency

    async def run(
        self, load_text: Callable[[], ModelText], reading: IO[bytes], writing: IO[bytes]
    ) -> bool:
        """Answer the lines of `reading`; return whether all were answered.

        Raises EngineDeadError. Leaves no process behind.
        """
        loop = asyncio.get_running_loop()
        stopped = loop.create_future()  # by a signal, or by the end of the engine
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, _stop, stopped)
        processes = Supervisor(self._programs, ())
        client = EngineReplicas(processes.addresses, memory=processes.memory)
        for each in client.clients:
            each.dead.add_done_callback(lambda _: _stop(stopped))
        service = Service(self._options, client)
        watch: asyncio.Task[None] | None = None
        try:
            await processes.start(client)
            watch = asyncio.create_task(processes.watch_engines(client))
            is_whole = await self._open(service, client, load_text, stopped) and await self._answer(
                service, stopped, reading, writing
            )
            for replica, each in enumerate(client.clients):
                if each.dead.done():
                    name = client.name_of(replica)
                    raise EngineDeadError(f"{name} ended: {each.dead.result()}")
            if is_whole:
                await processes.retire(client)
            return is_whole
        finally:
            if watch is not None:
                watch.cancel()
            await processes.stop()
            service.close()
            client.close()

    async def _open(
        self,
        service: Service,
        engine: EngineReplicas,
        load_text: Callable[[], ModelText],
        stopped: asyncio.Future[None],
    ) -> bool:
        """Load the tokenizer while the engine loads; return whether requests can be answered."""
        text = await asyncio.to_thread(load_text)
        engine.send(WorkerReady())
        events: list[asyncio.Future[Any]] = [engine.ready, stopped]
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            return False
        service.open(text, engine.ready.result())
        return True

    async def _answer(
        self,
        service: Service,
        stopped: asyncio.Future[None],
        reading: IO[bytes],
        writing: IO[bytes],
    ) -> bool:
        has_bar = sys.stderr.isatty()
        total = count_lines(reading) if has_bar else None
        with tqdm(total=total, desc="Answering", unit="req", disable=not has_bar) as bar:

            def show(counts: Counts) -> None:
                bar.set_postfix_str(f"{counts.num_failed} failed", refresh=False)
                bar.update()

            runner = BatchRunner(
                create_app(service, self._hooks.add_middleware),
                read_lines(reading, service.max_body_bytes + LINE_OVERHEAD),
                writing,
                concurrency=self._concurrency,
                on_progress=show,
            )
            self.counts = runner.counts
            return await runner.run(stopped)


def _stop(stopped: asyncio.Future[None]) -> None:
    if not stopped.done():
        stopped.set_result(None)
