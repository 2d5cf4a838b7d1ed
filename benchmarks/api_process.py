"""Measure the CPU time of API workers per streamed token, with an engine that only hands out tokens.

Prints the metrics of the load and the CPU time of the workers. Example with 256 users, who send 512 requests of 64
prompt tokens and get 200 tokens each:

    python benchmarks/api_process.py 256 512 64 200
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from socket import socket as Socket

import numpy as np
import psutil
import zmq
from tokenspeed_bench.client import LoadOptions, run
from tokenspeed_bench.connection import Target
from tokenspeed_bench.metrics import of_records
from tokenspeed_bench.shapes import write
from tokenspeed_bench.traffic import Traffic, load
from tokenspeed_server.lifecycle import WorkerConfig, serve
from tokenspeed_server.listen import listen, url
from tokenspeed_server.replicas.memory import ReplicaMemory
from tokenspeed_server.service import Options
from tokenspeed_server.supervisor import Supervised, Supervisor

from tokenspeed_core.commands.serving import ModelText
from tokenspeed_core.engine.messages import (
    Abort,
    Drain,
    Heartbeat,
    Outputs,
    Ready,
    Submit,
    WorkerReady,
    to_engine,
)
from tokenspeed_core.engine.parent_death import attach_to_parent
from tokenspeed_core.engine.subprocesses import Program
from tokenspeed_core.engine.transport import bind, send, send_outputs
from tokenspeed_core.text.tokenizer import load_tokenizer

HERE = Path(__file__)
VOCAB_SIZE = 100_000
_ENGINE_SETTINGS = ("addresses", "step_seconds", "longest", "token")


def hand_out_tokens(
    addresses: list[str], step_seconds: float, longest: int = 65536, token: int | None = None
) -> None:
    """Run an engine that gives every sequence a token per step, at fixed intervals."""
    poller, sockets = zmq.Poller(), [bind(address) for address in addresses]
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    left: dict[int, int] = {}
    num_steps, num_silent, due = 0, len(sockets), time.perf_counter()
    while True:
        while ready := poller.poll(0 if left else None):
            for socket, _ in ready:
                match to_engine.unpack(socket.recv()):
                    case Submit() as request:
                        left.update(
                            {request.request_id + i: request.max_tokens for i in range(request.n)}
                        )
                    case Abort() as abort:
                        for sequence_id in abort.sequence_ids.tolist():
                            left.pop(sequence_id, None)
                    case WorkerReady():
                        num_silent -= 1
                        for each in [] if num_silent else sockets:
                            send(each, Ready(longest, 1 << 30, VOCAB_SIZE, "{}"))
                    case Drain():
                        return
            if not left:
                due = time.perf_counter()
        due = max(due + step_seconds, time.perf_counter() - step_seconds)
        time.sleep(max(0.0, due - time.perf_counter()))
        ids = np.array(list(left), np.int64)
        left = {sequence_id: count - 1 for sequence_id, count in left.items()}
        finish = np.array([2 if count == 0 else 0 for count in left.values()], np.int32)
        left = {sequence_id: count for sequence_id, count in left.items() if count}
        zeros, ones = np.zeros(len(ids), np.int32), np.ones(len(ids), np.int32)
        tokens = ids % VOCAB_SIZE if token is None else np.full(len(ids), token)
        send_outputs(sockets, Outputs(ids, ones, tokens.astype(np.int32), finish, zeros))
        num_steps += 1
        for socket in sockets if num_steps % 100 == 0 or not left else []:
            send(socket, Heartbeat(num_steps, len(left), 0, is_draining=False))


def worker_config(bound: Socket, folder: Path) -> WorkerConfig:
    """Return the configuration of a worker with the tokenizer of a folder."""
    text = ModelText(load_tokenizer(folder), None)
    return WorkerConfig(
        bound,
        Options("canned"),
        lambda: text,
        log_level="warning",
        on_ready=lambda text: print("ready", flush=True),
    )


def be_server(step_seconds: float, num_workers: int, folder: str) -> int:
    """Run the first worker, which starts the engine and the other workers."""
    bound, *others = listen("127.0.0.1", 0, num_workers)
    print(url(bound), flush=True)
    engine = Program([sys.executable, str(HERE), "--engine"], {"step_seconds": step_seconds})
    command = [sys.executable, str(HERE), "--worker", folder]
    memory = ReplicaMemory(num_workers, 1)
    shared = {"num_workers": num_workers, "replicas_fd": memory.fd}
    workers = [Program(command, shared, each, [memory.fd]) for each in others]
    return serve(worker_config(bound, Path(folder)), Supervisor([engine], workers, memory))


def be_worker(folder: str, arguments: list[str]) -> int:
    """Run a secondary worker."""
    data, pipe = attach_to_parent(arguments)
    number = data["worker"]
    memory = ReplicaMemory(data["num_workers"], 1, data["replicas_fd"])
    supervised = Supervised(number, data["addresses"], pipe, memory)
    return serve(worker_config(Socket(fileno=data["listen_fds"][0]), Path(folder)), supervised)


def measure(
    traffic: Traffic, pace: LoadOptions, step_seconds: float, num_workers: int, folder: Path
) -> int:
    """Run the server and a load; print the figures."""
    command = [
        sys.executable,
        str(HERE),
        "--server",
        str(step_seconds),
        str(num_workers),
        str(folder),
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        base = server.stdout.readline().strip()
        for _ in range(num_workers):
            server.stdout.readline()
        first = psutil.Process(server.pid)
        others = [each for each in first.children() if "--worker" in each.cmdline()]
        before = [sum(each.cpu_times()[:2]) for each in (first, *others)]
        answers = run(Target(base, "canned"), traffic.sessions, pace)
        after = [sum(each.cpu_times()[:2]) for each in (first, *others)]
        seconds = [end - begin for begin, end in zip(before, after, strict=True)]
        figures = of_records(answers.records, {}, len(answers.failures)) | {
            "api_workers": num_workers
        }
        per_token = round(sum(seconds) / figures["output_tokens"] * 1e6, 2)
        print(
            json.dumps(
                {
                    **figures,
                    "api_us_per_token": per_token,
                    "api_seconds": [round(s, 2) for s in seconds],
                }
            )
        )
    finally:
        server.terminate()
        server.wait()
    return 0


def main() -> int:
    """Run the engine, a worker or the measurement, as the arguments say."""
    if sys.argv[1:2] == ["--engine"]:
        data, _ = attach_to_parent(sys.argv[2:])
        hand_out_tokens(**{name: data[name] for name in _ENGINE_SETTINGS if name in data})
        return 0
    if sys.argv[1:2] == ["--worker"]:
        return be_worker(sys.argv[2], sys.argv[3:])
    if sys.argv[1:2] == ["--server"]:
        return be_server(float(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("users", type=int, help="number of concurrent users")
    parser.add_argument("requests", type=int, help="number of requests of all users")
    parser.add_argument("in_len", type=int, help="mean prompt tokens per request")
    parser.add_argument("out_len", type=int, help="mean output tokens per request")
    parser.add_argument(
        "--procs",
        type=int,
        default=max(1, (os.cpu_count() or 2) // 4),
        help="number of client processes",
    )
    parser.add_argument(
        "--step-ms", type=float, default=6.0, help="milliseconds between engine steps"
    )
    parser.add_argument("--api-workers", type=int, default=1, help="number of API workers")
    given = parser.parse_args()
    traffic = load(given.requests, given.in_len, given.out_len, is_fixed=False)
    pace = LoadOptions(given.users, None, given.procs)
    with tempfile.TemporaryDirectory() as folder:
        model = write("qwen3-0.6b", Path(folder))
        return measure(traffic, pace, given.step_ms / 1e3, given.api_workers, model)


if __name__ == "__main__":
    raise SystemExit(main())
