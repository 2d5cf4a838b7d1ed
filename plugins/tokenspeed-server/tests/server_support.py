"""A server on a fake engine, each in its own process."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from stall_meter import StallMeter
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenspeed_server.lifecycle import WorkerConfig, serve
from tokenspeed_server.listen import listen, url
from tokenspeed_server.metrics import MetricsMemory
from tokenspeed_server.observability import Observability
from tokenspeed_server.replicas.memory import ReplicaMemory
from tokenspeed_server.service import Options
from tokenspeed_server.supervisor import Supervised, Supervisor
from tokenspeed_server.unix_socket import listen_unix

from tokenspeed_core.commands.serving import Defaults, ModelText
from tokenspeed_core.engine.parent_death import attach_to_parent
from tokenspeed_core.engine.subprocesses import Program
from tokenspeed_core.errors import CheckpointError, EngineDeadError
from tokenspeed_core.text import ChatTemplate
from tokenspeed_core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import httpx  # only the tests' process imports it, not the server

HERE = Path(__file__).parent
EOS = "<|end|>"
TEMPLATE = (
    "{%- for message in messages %}{{ message.role }}: {{ message.content }}\n"
    "{%- if message.tool_calls %}{{ message.tool_calls[0].function.arguments.x }}{% endif %}{% endfor %}"
    "{%- if tools %}{{ tools | tojson }}{% endif %}"
    "{%- if add_generation_prompt %}assistant:{% endif %}{% if shout is defined %}!{% endif %}"
)


def make_tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer of 400 tokens. The fake engine misbehaves on the last ones."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    text = ["hello world, how are you today? I am fine, thank you! user: assistant: system: " * 3]
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(text, trainer)
    while backend.get_vocab_size() < 400:
        backend.add_tokens([AddedToken(f"<extra{backend.get_vocab_size()}>", normalized=False)])
    return Tokenizer(backend, {"eos_token": EOS})


@dataclass
class Setup:
    """The settings of a server under test."""

    log: str
    engine: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    has_tokenizer: bool = True
    text_fails: bool = False
    num_workers: int = 1
    uds: str | None = None
    certificate: str | None = None  # a file with a certificate and its key
    has_metrics: bool = False
    num_engines: int = 1
    stalls: str | None = None  # the file of a StallMeter
    restarts: bool = False


@dataclass
class Running:
    """A server under test."""

    url: str
    process: subprocess.Popen[str]
    log: Path
    uds: str | None = None
    certificate: str | None = None

    def client(self, **kinds: Any) -> httpx.Client:
        """Return a client of the server."""
        import httpx

        kinds["verify"] = False  # else each client reads the system's certificates, for 30 ms
        if self.uds is not None:
            kinds["transport"] = httpx.HTTPTransport(uds=self.uds, verify=False)
        if self.certificate is not None:
            kinds["verify"] = ssl.create_default_context(cafile=self.certificate)
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, **kinds)

    def async_client(self) -> httpx.AsyncClient:
        """Return an asynchronous client of a server without TLS."""
        import httpx

        return httpx.AsyncClient(base_url=self.url, timeout=60, trust_env=False, verify=False)

    def is_ready(self) -> bool:
        """Say whether the worker of a new connection accepts requests."""
        with self.client() as client:
            return client.get("/ready").status_code == 200

    def notes(self) -> list[str]:
        """Return the lines that the fake engine wrote."""
        return [line.split(" ", 1)[1] for line in self.log.read_text().splitlines()]

    def said(self) -> str:
        """Return the server's own log."""
        return Path(f"{self.log}.server").read_text()

    def complaints(self) -> str:
        """Return the server's stderr."""
        return Path(f"{self.log}.stderr").read_text()

    def engine_pid(self) -> int:
        """Return the fake engine's process id."""
        return int(self.log.read_text().split(" ", 1)[0])

    def wait_for(self, note: str, seconds: float = 60.0) -> None:
        """Wait until the fake engine has written a line with this text."""
        wait_until(
            lambda: any(note in line for line in self.notes()),
            seconds,
            f"{note!r} in {self.notes()}",
        )


def wait_until(condition: Any, seconds: float, what: str) -> None:
    """Wait for a condition, or fail."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Say whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def running(
    folder: Path,
    *,
    engine: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    has_tokenizer: bool = True,
    text_fails: bool = False,
    num_workers: int = 1,
    uds: str | None = None,
    certificate: str | None = None,
    has_metrics: bool = False,
    num_engines: int = 1,
    stalls: Path | None = None,
    restarts: bool = False,
    waits: bool = True,
) -> Iterator[Running]:
    """Run a server until the block ends."""
    log = folder / f"engine-{time.monotonic_ns()}.log"
    setup = Setup(
        str(log),
        engine or {},
        options or {},
        has_tokenizer,
        text_fails,
        num_workers,
        uds,
        certificate,
        has_metrics,
        num_engines,
        None if stalls is None else str(stalls),
        restarts,
    )
    with open(f"{log}.stderr", "w", encoding="utf-8") as stderr:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "server_support.py"), json.dumps(asdict(setup))],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "TMPDIR": str(folder)},
        )
    try:
        assert process.stdout is not None
        server = Running(process.stdout.readline().strip(), process, log, uds, certificate)
        assert server.url, f"the server ended with status {process.wait()}"
        if waits:
            # The system gives a connection to any worker.
            connections = 16 if num_workers > 1 else 1
            wait_until(lambda: all(server.is_ready() for _ in range(connections)), 60, "ready")
        yield server
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def launch(
    setup: Setup, bound: socket.socket, worker: int = 0, memory: MetricsMemory | None = None
) -> WorkerConfig:
    """Return the configuration of an API worker."""
    logging.basicConfig(level=logging.INFO, filename=f"{setup.log}.server")
    tokenizer = make_tokenizer() if setup.has_tokenizer else None
    template = None if tokenizer is None else ChatTemplate(TEMPLATE, tokenizer.special_tokens)
    text = ModelText(tokenizer, template, Defaults(temperature=0.7, eos_token_ids=(0,)))

    def load_text() -> ModelText:
        if setup.text_fails:
            raise CheckpointError("no tokenizer")
        return text

    tasks = []

    def ready(text: ModelText) -> None:
        if setup.stalls is not None:
            tasks.append(asyncio.create_task(StallMeter(Path(setup.stalls)).run()))
        print("ready", flush=True)

    options = Options(**{"model_name": "fake", "request_log_level": 0, **setup.options})
    observability = None
    if memory is not None:
        observability = Observability.with_metrics(
            memory, worker, "fake", has_prometheus=True, num_engines=setup.num_engines
        )
    return WorkerConfig(
        bound,
        options,
        load_text,
        log_level="warning",
        on_ready=ready,
        certificate=setup.certificate,
        observability=observability,
    )


def main(argument: str) -> int:
    """Run a server."""
    setup = Setup(**json.loads(argument))
    with ExitStack() as opened:
        if setup.uds is None:
            sockets = listen("127.0.0.1", 0, setup.num_workers)
            where = url(sockets[0], "https" if setup.certificate else "http")
        else:
            sockets = opened.enter_context(listen_unix(setup.uds, setup.num_workers))
            where = "http://localhost"
        print(where, flush=True)
        return serve_setup(setup, *sockets)


def serve_setup(setup: Setup, bound: socket.socket, *others: socket.socket) -> int:
    """Serve on these sockets, one per API worker."""
    command = [sys.executable, str(HERE / "fake_engine.py")]
    config = {"vocab_size": 400, "log": setup.log, **setup.engine}
    engines = [Program(command, {"config": config})] * setup.num_engines
    memory = MetricsMemory(setup.num_workers) if setup.has_metrics else None
    replicas = ReplicaMemory(setup.num_workers, setup.num_engines)
    fds = [replicas.fd] if memory is None else [replicas.fd, memory.fd]
    command = [sys.executable, str(HERE / "server_support.py")]
    data = {"setup": asdict(setup), "fds": fds}
    workers = [Program(command, data, each, fds) for each in others]
    return serve(
        launch(setup, bound, 0, memory),
        Supervisor(engines, workers, replicas, lambda: setup.restarts),
    )


def be_worker(arguments: list[str]) -> int:
    """Run a secondary API worker."""
    data, pipe = attach_to_parent(arguments)
    time.sleep(data["setup"]["engine"].get("worker_seconds", 0))
    bound, number = socket.socket(fileno=data["listen_fds"][0]), data["worker"]
    setup = Setup(**data["setup"])
    replicas = ReplicaMemory(setup.num_workers, setup.num_engines, data["fds"][0])
    memories = [MetricsMemory(setup.num_workers, fd) for fd in data["fds"][1:]]
    try:
        return serve(
            launch(setup, bound, number, *memories),
            Supervised(number, data["addresses"], pipe, replicas),
        )
    except EngineDeadError:
        return 1


if __name__ == "__main__":
    sys.exit(be_worker(sys.argv[1:]) if sys.argv[1].isdecimal() else main(sys.argv[1]))
