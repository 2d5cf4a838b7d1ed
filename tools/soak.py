"""Sends mixed traffic to a running server and checks its answers, memory, descriptors and pages.

    python tools/soak.py http://127.0.0.1:8000 --requests 20000 --pid $(pgrep -of 'tokenspeed serve')

Good requests must get the same answer as alone (use float32: in bfloat16 the answer depends on the other
requests of a step). Others leave early, read slowly, stop in the middle of a body, or are wrong and must
get a 4xx. At the end nothing may be running, and the memory and descriptors of the server's processes may
not have grown since the first fifth. Prints one line per check and exits with 1 if one failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import httpx
import psutil

NUM_PROMPTS = 24
WARMED_UP = 0.2  # of the requests
MAX_GROWTH = 1.15  # of memory after the warm-up
EXTRA_MEMORY = 48 * 2**20  # bytes
EXTRA_FILES = 24
SAMPLE_SECONDS = 1.0
IDLE_SECONDS = 60.0
KEPT_PAGES = ("held", "pending")  # states with the same counts before and after
WORDS = (
    "the sum of two and seven is a list in python that sorts words while rivers run east".split()
)

WRONG: list[tuple[str, bytes]] = [
    ("/v1/completions", b"{"),
    ("/v1/completions", b""),
    ("/v1/completions", b"[]"),
    ("/v1/completions", b'{"prompt": [-1]}'),
    ("/v1/completions", b'{"prompt": [4294967296]}'),
    ("/v1/completions", b'{"prompt": "a", "n": 1000000}'),
    ("/v1/completions", b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}"),
    ("/v1/completions", b'{"prompt": "a", "repetition_penalty": 1e-38}'),
    ("/v1/completions", b'{"prompt": "a", "stop": [' + b"1," * 30_000 + b"1]}"),
    ("/v1/completions", b'{"prompt": "\\ud800"}'),
    ("/v1/chat/completions", b'{"messages": [' + b"{}," * 3000 + b"{}]}"),
    ("/v1/chat/completions", b'{"messages": [{"role": "robot", "content": "x"}]}'),
    ("/v1/chat/completions", b"[" * 10_000),
    ("/v1/nothing", b"{}"),
]


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--api-key")
    parser.add_argument("--pid", type=int, help="the server's first process, to watch its memory")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(words)


@dataclass
class Sample:
    """The memory in bytes and the open files of the server's processes."""

    memory: int
    num_files: int


@dataclass
class Soak:
    """A run: its requests, problems and measurements."""

    arguments: argparse.Namespace
    client: httpx.AsyncClient
    random: random.Random
    num_left: int = 0
    sent: Counter[str] = field(default_factory=Counter)
    problems: Counter[str] = field(default_factory=Counter)
    samples: list[tuple[int, Sample]] = field(default_factory=list)
    expected: list[tuple[dict[str, Any], str]] = field(default_factory=list)

    async def run(self) -> bool:
        """Send everything and check the server. Return whether all was well."""
        await self._ask_alone()
        before = await self._pages_when_idle({})
        self.num_left = self.arguments.requests
        watch = asyncio.create_task(self._watch())
        workers = [self._work() for _ in range(self.arguments.concurrency)]
        started = time.monotonic()
        await asyncio.gather(*workers)
        seconds = time.monotonic() - started
        watch.cancel()
        print(f"{sum(self.sent.values())} requests in {seconds:.0f} s: {dict(self.sent)}")
        after = await self._pages_when_idle(before)
        is_idle = _report("nothing is left running and no page is held", bool(after), str(after))
        return all([self._check_answers(), is_idle, *self._check_growth()])

    async def _ask_alone(self) -> None:
        for i in range(NUM_PROMPTS):
            text = " ".join(self.random.choices(WORDS, k=4 + i))
            body: dict[str, Any] = {"max_tokens": self.arguments.max_tokens, "temperature": 0}
            is_chat = i % 2 == 1
            body |= (
                {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
            )
            answer = await self.client.post(_path(body), json=body)
            answer.raise_for_status()
            self.expected.append((body, _text(answer.json())))

    async def _work(self) -> None:
        kinds: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self._good, 30),
            (self._stream, 25),
            (self._abort, 15),
            (self._read_slowly, 5),
            (self._wrong, 20),
            (self._half, 5),
        ]
        while self.num_left > 0:
            self.num_left -= 1
            kind = self.random.choices(*map(list, zip(*kinds, strict=True)))[0]
            name = kind.__name__.strip("_")
            self.sent[name] += 1
            try:
                await kind()
            except (httpx.HTTPError, OSError) as error:
                self.problems[f"{name}: {type(error).__name__}: {error}"[:120]] += 1

    async def _good(self) -> None:
        body, expected = self.random.choice(self.expected)
        answer = await self.client.post(_path(body), json=body)
        if answer.status_code != 200:
            self.problems[f"good: status {answer.status_code}"] += 1
        elif _text(answer.json()) != expected:
            self.problems["good: another answer"] += 1

    async def _stream(self) -> None:
        body, expected = self.random.choice(self.expected)
        text, is_whole = "", False
        async with self.client.stream("POST", _path(body), json={**body, "stream": True}) as answer:
            async for line in answer.aiter_lines():
                is_whole = is_whole or line == "data: [DONE]"
                if line.startswith("data: {"):
                    text += _text(json.loads(line[6:]))
        if text != expected or not is_whole:
            self.problems["stream: another answer"] += 1

    async def _abort(self) -> None:
        body = {**self.random.choice(self.expected)[0], "max_tokens": 200, "stream": True}
        async with self.client.stream("POST", _path(body), json=body) as answer:
            lines = answer.aiter_lines()
            for _ in range(self.random.randrange(4)):
                await anext(lines, None)

    async def _read_slowly(self) -> None:
        body = {**self.random.choice(self.expected)[0], "max_tokens": 100, "stream": True, "n": 4}
        async with self.client.stream("POST", _path(body), json=body) as answer:
            async for _ in answer.aiter_raw(64):
                await asyncio.sleep(0.01)
                if self.random.random() < 0.02:
                    return

    async def _wrong(self) -> None:
        path, body = self.random.choice(WRONG)
        answer = await self.client.post(path, content=body)
        if not 400 <= answer.status_code < 500:
            self.problems[f"wrong: status {answer.status_code} for {body[:40]!r}"] += 1

    async def _half(self) -> None:
        url = httpx.URL(self.arguments.url)
        _, writer = await asyncio.open_connection(url.host, url.port or 80)
        whole = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n{"
        writer.write(whole[: self.random.randrange(1, len(whole) + 1)])
        await writer.drain()
        await asyncio.sleep(self.random.random() / 10)
        writer.close()

    async def _watch(self) -> None:
        while self.arguments.pid:
            num_done = self.arguments.requests - self.num_left
            self.samples.append((num_done, _sample(self.arguments.pid)))
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _pages_when_idle(self, before: dict[str, int]) -> dict[str, int]:
        """Return the pages by state once nothing runs and no more are held than before, else {}."""
        deadline = time.monotonic() + IDLE_SECONDS
        while time.monotonic() < deadline:
            stats = (await self.client.get("/v1/stats")).json()
            pages: dict[str, int] = stats.get("kv_cache", {}).get("pages", {})
            is_same = all(pages.get(key) == before.get(key, pages.get(key)) for key in KEPT_PAGES)
            if "requests" in stats and not any(stats["requests"].values()) and is_same:
                return pages
            await asyncio.sleep(0.5)
        return {}

    def _check_answers(self) -> bool:
        shown = "; ".join(f"{n} x {what}" for what, n in self.problems.most_common(10))
        return _report("every answer is right", not self.problems, shown or "no problem")

    def _check_growth(self) -> list[bool]:
        start = self.arguments.requests * WARMED_UP
        warm = [sample for num_done, sample in self.samples if num_done >= start]
        if len(warm) < 4:
            return []
        early, late = warm[: len(warm) // 4 or 1], warm[-(len(warm) // 4 or 1) :]
        before, after = (median(each.memory for each in part) for part in (early, late))
        files, later = (median(each.num_files for each in part) for part in (early, late))
        is_flat = after <= before * MAX_GROWTH + EXTRA_MEMORY
        return [
            _report("memory is flat", is_flat, f"{before / 2**20:.0f} to {after / 2**20:.0f} MiB"),
            _report("descriptors are flat", later <= files + EXTRA_FILES, f"{files} to {later}"),
        ]


def _path(body: dict[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def _text(answer: dict[str, Any]) -> str:
    """Return the text of the first choice of an answer or an event, with its reasoning."""
    for choice in answer.get("choices", ()):
        message = choice.get("message") or choice.get("delta") or choice
        parts = (message.get("reasoning_content"), message.get("content"), message.get("text"))
        return "".join(part for part in parts if part)
    return ""


def _sample(pid: int) -> Sample:
    memory = num_files = 0
    first = psutil.Process(pid)
    for process in (first, *first.children(recursive=True)):
        try:
            memory += process.memory_info().rss
            num_files += process.num_fds()
        except psutil.Error:
            continue  # it has just ended
    return Sample(memory, num_files)


def _report(what: str, is_right: bool, found: str) -> bool:
    print(f"{'ok ' if is_right else 'BAD'} {what}: {found}")
    return is_right


async def main(words: list[str] | None = None) -> int:
    """Run a soak; return the exit status."""
    arguments = parse_arguments(words)
    key = arguments.api_key
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    limits = httpx.Limits(max_connections=2 * arguments.concurrency)
    async with httpx.AsyncClient(
        base_url=arguments.url, headers=headers, timeout=120, limits=limits, trust_env=False
    ) as client:
        is_well = await Soak(arguments, client, random.Random(arguments.seed)).run()
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
