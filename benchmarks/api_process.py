"""What the API process costs a streamed token: the real server, on an engine that only hands out tokens.

Prints the load's figures with the API process's own CPU time. Example, 256 users:

    python benchmarks/api_process.py 256 512 64 200
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgpack
import numpy as np
import psutil
import zmq
from tokenspeed_bench.client import Pace, run
from tokenspeed_bench.connection import Target
from tokenspeed_bench.figures import of_records
from tokenspeed_bench.traffic import Traffic, load

from tokenspeed_core.messages import Abort, Drain, Outputs, Pulse, Ready, Submit, to_engine
from tokenspeed_core.requests import Defaults
from tokenspeed_core.server.lifecycle import Launch, serve
from tokenspeed_core.server.listen import listen, url
from tokenspeed_core.server.service import ModelText, Options
from tokenspeed_core.wire import pack

HERE = Path(__file__)
VOCAB_SIZE = 100_000


def hand_out_tokens(path: str, step_seconds: float) -> None:
    """Be an engine: a token for every sequence each step, steps on a fixed beat."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.connect(f"ipc://{path}")
    socket.send(pack(Ready(65536, 4096, 1 << 30, VOCAB_SIZE, "{}")))
    left: dict[int, int] = {}
    num_steps, due = 0, time.perf_counter()
    while True:
        while not left or socket.poll(0):
            match to_engine.unpack(socket.recv()):
                case Submit() as request:
                    left.update({request.request_id + i: request.max_tokens for i in range(request.n)})
                case Abort() as abort:
                    for sequence_id in abort.sequence_ids.tolist():
                        left.pop(sequence_id, None)
                case Drain():
                    return
        due = max(due + step_seconds, time.perf_counter() - step_seconds)
        time.sleep(max(0.0, due - time.perf_counter()))
        ids = np.array(list(left), np.int64)
        left = {sequence_id: count - 1 for sequence_id, count in left.items()}
        finish = np.array([2 if count == 0 else 0 for count in left.values()], np.int32)
        left = {sequence_id: count for sequence_id, count in left.items() if count}
        none, zeros, ones = np.zeros(0, np.int32), np.zeros(len(ids), np.int32), np.ones(len(ids), np.int32)
        no_floats = np.zeros(0, np.float32)
        socket.send(pack(Outputs(
            ids, ones, (ids % VOCAB_SIZE).astype(np.int32), finish, zeros, none, 0, no_floats, none, none, no_floats
        )))
        num_steps += 1
        if num_steps % 100 == 0:
            socket.send(pack(Pulse(num_steps, len(left), 0, 1, 1, 0, False)))


def be_server(step_seconds: float) -> int:
    """Serve without a tokenizer: every event has a token's id, as it would have its text."""
    bound = listen("127.0.0.1", 0)
    print(url(bound), flush=True)
    command = [sys.executable, str(HERE), "--engine"]
    text = ModelText(None, None, Defaults())
    return serve(Launch(
        bound, Options("canned"), lambda: text, {"step_seconds": step_seconds}, "", log_level="warning",
        engine_command=command,
        on_ready=lambda service: print("ready", flush=True),
    ))


def measure(traffic: Traffic, pace: Pace, step_seconds: float) -> int:
    """Run the server and a load; print the figures."""
    command = [sys.executable, str(HERE), "--server", str(step_seconds)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        base = server.stdout.readline().strip()
        server.stdout.readline()
        process = psutil.Process(server.pid)
        before = sum(process.cpu_times()[:2])
        answers = run(Target(base, "canned"), traffic.sessions, pace)
        seconds = sum(process.cpu_times()[:2]) - before
        figures = of_records(answers.records, {}) | {"failed": len(answers.failures)}
        print(json.dumps({**figures, "api_us_per_token": round(seconds / figures["output_tokens"] * 1e6, 2)}))
    finally:
        server.terminate()
        server.wait()
    return 0


def main() -> int:
    """Be what the arguments say: the engine, the server, or the measurement."""
    if sys.argv[1:2] == ["--engine"]:
        with open(sys.argv[2], "rb") as file:
            data = msgpack.unpack(file)
        hand_out_tokens(data["socket"], data["config"]["step_seconds"])
        return 0
    if sys.argv[1:2] == ["--server"]:
        return be_server(float(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("users", "requests", "in_len", "out_len"):
        parser.add_argument(name, type=int)
    parser.add_argument("--procs", type=int, default=max(1, (os.cpu_count() or 2) // 4), help="client processes")
    parser.add_argument("--step-ms", type=float, default=6.0, help="the engine's beat")
    given = parser.parse_args()
    traffic = load(given.requests, given.in_len, given.out_len, is_fixed=False)
    return measure(traffic, Pace(given.users, None, given.procs), given.step_ms / 1e3)


if __name__ == "__main__":
    raise SystemExit(main())
