"""Load an OpenAI-compatible server with streamed completions from several processes; print one JSON line.

The loop is closed: each user keeps one connection and sends its next request when its last one is done.
Lengths vary by half around IN_LEN and OUT_LEN (seeded; --fixed: all equal), so that requests do not end
together. Prompts are token ids. The client parses no JSON per token: it counts events and stamps their
arrival, so that one process follows some 50,000 events a second. `canned_server.py` shows what it costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from urllib.parse import urlsplit

SEED = 5
FIRST_ID, END_ID = 1000, 90_000
START_SECONDS = 1.0     # for the client processes to be there
ANSWER_SECONDS = 900
EVENT = b"data: {"
LAST_CHUNK = b"0\r\n\r\n"
USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')
KEEP = 900              # bytes of the stream's end that are kept, for its usage

Job = tuple[list[int], int]


@dataclass
class Record:
    """One answered request; times in seconds of one clock. `events`: when each event with text arrived."""

    sent: float
    events: list[float]
    num_tokens: int
    done: float


@dataclass
class User(asyncio.Protocol):
    """One user's connection: a request at a time."""

    transport: asyncio.Transport | None = None
    answer: asyncio.Future[Record] | None = None
    tail: bytes = b""
    events: list[float] = field(default_factory=list)
    sent: float = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self.answer is not None and not self.answer.done():
            said = self.tail[-200:].decode(errors="replace")
            self.answer.set_exception(error or ConnectionError(f"the server closed the connection: {said}"))

    def ask(self, head: bytes, body: bytes) -> asyncio.Future[Record]:
        """Send a request and return its answer to come."""
        assert self.transport is not None
        self.answer = asyncio.get_running_loop().create_future()
        self.tail, self.events = b"", []
        self.sent = time.perf_counter()
        self.transport.write(head % len(body) + body)
        return self.answer

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        assert self.answer is not None
        seam = self.tail[1 - len(EVENT):] + data  # a mark may be cut between two reads
        self.events += [now] * seam.count(EVENT)
        self.tail = (self.tail + data)[-KEEP:]
        is_refusal = data.startswith(b"HTTP/") and not data.startswith(b"HTTP/1.1 200")
        if is_refusal and not self.events and not self.answer.done():
            self.answer.set_exception(RuntimeError(data[:300].decode(errors="replace")))
        elif self.tail.endswith(LAST_CHUNK) and b"data: [DONE]" in self.tail and not self.answer.done():
            self.answer.set_result(self._record(now))

    def _record(self, now: float) -> Record:
        usage = USAGE.findall(self.tail)
        events = self.events[:-1] if usage else self.events  # the last one has the usage, no text
        return Record(self.sent, events, int(usage[-1]) if usage else len(events), now)


def make_jobs(num_requests: int, in_len: int, out_len: int, is_fixed: bool) -> list[Job]:
    """Return the requests: prompts as ids, and output lengths."""
    rng = random.Random(SEED)

    def vary(length: int) -> int:
        return length if is_fixed else rng.randint(length // 2, length + length // 2)

    return [
        ([rng.randrange(FIRST_ID, END_ID) for _ in range(vary(in_len))], vary(out_len))
        for _ in range(num_requests)
    ]


async def run_users(url: str, model: str, jobs: Sequence[Job], num_users: int, go: Event) -> list[Record]:
    """Share the jobs among users and return what came of each."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        "Content-Type: application/json\r\nContent-Length: "
    ).encode() + b"%d\r\n\r\n"
    bodies = iter([
        json.dumps({
            "model": model, "prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }).encode()
        for prompt, length in jobs
    ])
    records: list[Record] = []

    async def user() -> None:
        transport, connection = await asyncio.get_running_loop().create_connection(User, host, port)
        for body in bodies:
            records.append(await connection.ask(head, body))
        transport.close()

    go.wait()
    await asyncio.gather(*[user() for _ in range(num_users)])
    return records


def client(
    url: str, model: str, jobs: Sequence[Job], num_users: int, go: Event, out: Queue[list[Record] | str]
) -> None:
    """Run one client process."""
    try:
        out.put(asyncio.run(run_users(url, model, jobs, num_users, go)))
    except Exception as error:  # whatever it was, the parent must hear of it and not wait
        out.put(f"{type(error).__name__}: {error}")


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return a quantile of sorted seconds, in milliseconds."""
    return round(values[min(len(values) - 1, int(share * len(values)))] * 1e3, 2) if values else None


def report(arguments: argparse.Namespace, num_procs: int, records: Sequence[Record]) -> dict[str, object]:
    """Return the run's figures."""
    seconds = max(r.done for r in records) - min(r.sent for r in records)
    first = sorted(r.events[0] - r.sent for r in records)
    gaps = sorted(b - a for r in records for a, b in zip(r.events, r.events[1:], strict=False))
    return {
        "workload": "http", "label": arguments.label, "users": arguments.users, "requests": arguments.requests,
        "in_len": arguments.in_len, "out_len": arguments.out_len, "procs": num_procs, "s": round(seconds, 3),
        "out_per_s": round(sum(r.num_tokens for r in records) / seconds, 1),
        "events_per_s": round(sum(len(r.events) for r in records) / seconds, 1),
        "ttft_p50_ms": quantile(first, 0.5), "ttft_p99_ms": quantile(first, 0.99),
        "itl_p50_ms": quantile(gaps, 0.5), "itl_p99_ms": quantile(gaps, 0.99),
    }


def main() -> int:
    """Run the load and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="base URL, such as http://127.0.0.1:8000")
    parser.add_argument("model")
    for name in ("users", "requests", "in_len", "out_len"):
        parser.add_argument(name, type=int)
    parser.add_argument("--procs", type=int, default=4, help="client processes")
    parser.add_argument("--label", default="", help="text to find the figures by")
    parser.add_argument("--fixed", action="store_true", help="all lengths equal")
    arguments = parser.parse_args()
    jobs = make_jobs(arguments.requests, arguments.in_len, arguments.out_len, arguments.fixed)
    num_procs = min(arguments.procs, arguments.users)
    context = multiprocessing.get_context("fork")
    go = context.Event()
    out: Queue[list[Record] | str] = context.Queue()
    clients = [
        context.Process(
            target=client,
            args=(
                arguments.url, arguments.model, jobs[i::num_procs],
                arguments.users // num_procs + (i < arguments.users % num_procs), go, out,
            ),
            daemon=True,
        )
        for i in range(num_procs)
    ]
    for process in clients:
        process.start()
    time.sleep(START_SECONDS)
    go.set()
    records: list[Record] = []
    for _ in clients:
        part = out.get(timeout=ANSWER_SECONDS)
        if isinstance(part, str):
            print(f"a client failed: {part}")
            return 1
        records += part
    print(json.dumps(report(arguments, num_procs, records)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
