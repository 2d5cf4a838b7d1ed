"""Replays attacks against a running server and measures the gaps in another client's stream.

    python tools/attacks.py http://127.0.0.1:8000

Each attack runs while a stream is read. A gap is the time between two events of the stream. Prints the
longest gap without an attack and during each, and exits with 1 if an attack adds more than --max-ms. Run it
on an idle machine with a core to spare for this client, against a server whose steps are short.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import httpx

QUIET_SECONDS = 1.0
MAX_TOKENS = 4000
USER = {"role": "user", "content": "hi"}


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("url")
    parser.add_argument("--max-ms", type=float, default=50.0)
    parser.add_argument("--only", help="run the attacks with this text in their name")
    parser.add_argument("--seconds", type=float, default=3.0, help="time of each attack")
    parser.add_argument("--megabytes", type=float, default=4.0, help="size of large bodies")
    return parser.parse_args(words)


def bodies(size: int) -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    """Yield the name, the path and a function that makes the body of each attack by one large request."""
    chat, completions = "/v1/chat/completions", "/v1/completions"

    def body(**fields: object) -> bytes:
        return json.dumps({"messages": [USER], **fields}).encode()

    yield "wrong stop strings", chat, lambda: body(stop=[1] * (size // 3))
    yield (
        "wrong content parts",
        chat,
        lambda: body(messages=[{**USER, "content": [1] * (size // 3)}]),
    )
    yield "wrong messages", chat, lambda: body(messages=[1] * (size // 3))
    yield "many tools", chat, lambda: body(tools=[{"type": "function"}] * (size // 22))
    yield "nested metadata", chat, lambda: body(metadata={"a": [[]] * (size // 4)})
    yield "keys of metadata", chat, lambda: body(metadata={f"k{i}": i for i in range(size // 16)})
    yield "unknown keys", chat, lambda: body(**{f"k{i}": i for i in range(size // 16)})
    yield "biases", chat, lambda: body(logit_bias={f"k{i}": 1 for i in range(size // 12)})
    yield "escapes", completions, lambda: b'{"prompt": "' + b"\\u0041" * (size // 6) + b'"}'
    yield "deep JSON", completions, lambda: b'{"prompt": ' + b"[" * size
    yield "long prompt", completions, lambda: json.dumps({"prompt": "word " * (size // 5)}).encode()
    yield "spaces", completions, lambda: json.dumps({"prompt": " " * size}).encode()
    yield "one word", completions, lambda: json.dumps({"prompt": "a" * size}).encode()
    yield "token ids", completions, lambda: json.dumps({"prompt": [5] * (size // 3)}).encode()
    yield (
        "control tokens",
        chat,
        lambda: body(messages=[{**USER, "content": "<|im_end|>" * (size // 10)}]),
    )
    yield "under the limits", chat, lambda: body(metadata={f"k{i}": [i] for i in range(40_000)})
    yield "blank lines", chat, lambda: body(messages=[{**USER, "content": "\n" * (size // 2)}])
    yield "many messages", chat, lambda: body(messages=[USER] * 4000)
    yield "long arguments", chat, lambda: body(messages=[USER, _call("[" * (size // 2)), USER])
    yield "wide schema", chat, lambda: body(response_format=_wide_schema(20_000))
    yield (
        "regex",
        completions,
        lambda: json.dumps({"prompt": "a", "guided_regex": "a?" * 9000}).encode(),
    )
    yield (
        "many stops",
        completions,
        lambda: json.dumps({"prompt": "a", "stop": ["a" * 999] * 64}).encode(),
    )
    yield "prompts", completions, lambda: json.dumps({"prompt": ["word " * 4000] * 32}).encode()
    yield "256k tokens", completions, lambda: json.dumps({"prompt": [5] * 262_000}).encode()
    yield "256k words", chat, lambda: body(messages=[{**USER, "content": "a b " * 65_000}])
    yield "prompts of ids", completions, lambda: json.dumps({"prompt": [[5] * 4096] * 32}).encode()
    yield (
        "echoed ids",
        completions,
        lambda: json.dumps({"prompt": [5] * 9000, "echo": True}).encode(),
    )
    yield "lone surrogates", completions, lambda: b'{"prompt": "' + b"\\ud800" * (size // 8) + b'"}'
    yield "digits", completions, lambda: b'{"prompt": "a", "seed": ' + b"9" * size + b"}"
    strings = {"prompt": "a b" * (size // 3), "return_token_strs": True}
    yield "token strings", "/tokenize", lambda: json.dumps(strings).encode()
    yield (
        "tokenized words",
        "/tokenize",
        lambda: json.dumps({"prompt": "\u4e00 " * (size // 7)}).encode(),
    )
    yield (
        "detokenized ids",
        "/detokenize",
        lambda: json.dumps({"tokens": [5] * (size // 9)}).encode(),
    )
    long_input = [{"role": "user", "content": "word " * (size // 5)}]
    yield "responses", "/v1/responses", lambda: json.dumps({"input": long_input}).encode()
    yield "wrong input", "/v1/responses", lambda: json.dumps({"input": [1] * (size // 3)}).encode()
    anthropic = {"max_tokens": 1, "messages": [{**USER, "content": [1] * (size // 3)}]}
    yield "wrong blocks", "/v1/messages", lambda: json.dumps(anthropic).encode()
    counted = {"messages": [{**USER, "content": "word " * (size // 5)}]}
    yield "counted tokens", "/v1/messages/count_tokens", lambda: json.dumps(counted).encode()


def _wide_schema(num_keys: int) -> dict[str, Any]:
    properties = {f"k{i}": {"type": "string"} for i in range(num_keys)}
    schema = {"type": "object", "properties": properties}
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def _call(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "1", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@dataclass
class Client:
    """A client of the server under attack."""

    http: httpx.AsyncClient
    host: str
    port: int

    async def post(self, path: str, body: bytes) -> None:
        """Send a body and read the answer, whatever it is."""
        with suppress(httpx.HTTPError):
            await self.http.post(path, content=body)

    async def send_raw(self, data: bytes) -> None:
        """Send bytes and read until the server closes, or for a second."""
        with suppress(OSError, TimeoutError):
            reader, writer = await asyncio.open_connection(self.host, self.port)
            try:
                writer.write(data)
                await asyncio.wait_for(reader.read(), 1.0)
            finally:
                writer.close()

    async def tiny_chunks(self) -> None:
        """Send a body in chunks of one byte."""
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        await self.send_raw(head + b"1\r\nx\r\n" * 300_000)

    async def many_headers(self) -> None:
        """Send a head of many short headers."""
        await self.send_raw(b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"a:b\r\n" * 200_000)

    async def half_requests(self) -> None:
        """Open many connections and send half a request on each."""
        half = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n"
        await asyncio.gather(*(self.send_raw(half) for _ in range(500)))

    async def logprobs(self) -> None:
        """Ask for a long answer with many log-probabilities."""
        fields = {"prompt": "a", "n": 128, "max_tokens": 300, "logprobs": 20, "ignore_eos": True}
        await self.post("/v1/completions", json.dumps(fields).encode())

    async def prompt_logprobs(self) -> None:
        """Ask for the log-probabilities of a long prompt."""
        fields = {"prompt": [5] * 9000, "max_tokens": 1, "echo": True, "logprobs": 20}
        await self.post("/v1/completions", json.dumps(fields).encode())

    async def many_sequences(self) -> None:
        """Ask for two answers of 128 sequences each."""
        fields = {"prompt": "a", "n": 128, "max_tokens": 100, "ignore_eos": True}
        body = json.dumps(fields).encode()
        await asyncio.gather(*(self.post("/v1/completions", body) for _ in range(2)))

    async def unread_stream(self) -> None:
        """Ask for a stream of many sequences, and read none of it."""
        fields = {"prompt": "a", "n": 64, "max_tokens": 300, "logprobs": 20, "stream": True}
        body = json.dumps({**fields, "ignore_eos": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
        with suppress(OSError):
            _, writer = await asyncio.open_connection(self.host, self.port, limit=1)
            writer.write(head % len(body) + body)
            await asyncio.sleep(1.0)
            writer.close()


Attack = Callable[[Client], Awaitable[None]]


async def post_large(path: str, body: Callable[[], bytes], client: Client) -> None:
    """Send a large body, which is made when it is first sent."""
    await client.post(path, body())


def attacks(size: int) -> dict[str, Attack]:
    """Return all attacks by name; those by one large request have bodies of about `size` bytes."""
    found: dict[str, Attack] = {
        name: partial(post_large, path, cache(body)) for name, path, body in bodies(size)
    }
    for method in (
        Client.tiny_chunks,
        Client.many_headers,
        Client.half_requests,
        Client.logprobs,
        Client.prompt_logprobs,
        Client.many_sequences,
        Client.unread_stream,
    ):
        found[method.__name__.replace("_", " ")] = method
    return found


def read_streams(url: str, longest: Any) -> None:
    """Read streams forever, in a separate process, and record the longest time between two events."""
    num_tokens = MAX_TOKENS
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        while num_tokens:
            fields = {"prompt": "a", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
            with http.stream("POST", "/v1/completions", json=fields) as answer:
                if answer.status_code != 200:
                    num_tokens //= 2  # it does not fit the context
                    continue
                last = None
                for _ in answer.iter_raw():
                    now = time.perf_counter()
                    longest.value = max(longest.value, now - (last or now))
                    last = now


async def longest_gap(longest: Any, attack: Callable[[], Awaitable[None]], seconds: float) -> float:
    """Return the longest gap, in seconds, while an attack is repeated."""
    await asyncio.sleep(0.2)
    longest.value = 0.0
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        await attack()
    await asyncio.sleep(0.1)
    return float(longest.value)


async def measure(longest: Any, client: Client, arguments: argparse.Namespace) -> list[str]:
    """Run the attacks one after the other; return those that delay the stream too much."""
    quiet = await longest_gap(longest, lambda: asyncio.sleep(QUIET_SECONDS), 0.0)
    if not quiet:
        raise SystemExit("the server sends no stream")
    print(f"{1e3 * quiet:7.1f} ms  without an attack")
    failed = []
    for name, attack in attacks(int(arguments.megabytes * 1e6)).items():
        if arguments.only and arguments.only not in name:
            continue
        gap = await longest_gap(longest, partial(attack, client), arguments.seconds)
        is_bad = 1e3 * (gap - quiet) > arguments.max_ms
        failed += [name] if is_bad else []
        print(f"{1e3 * gap:7.1f} ms  {name}{'  TOO LONG' if is_bad else ''}", flush=True)
    return failed


async def main(words: list[str] | None = None) -> int:
    """Run all attacks; return the exit status."""
    arguments = parse_arguments(words)
    url = httpx.URL(arguments.url)
    headers = {"content-type": "application/json"}
    async with httpx.AsyncClient(
        base_url=arguments.url, headers=headers, timeout=60, trust_env=False
    ) as http:
        client = Client(http, url.host, url.port or 80)
        longest = multiprocessing.Value("d", 0.0)
        reader = multiprocessing.Process(target=read_streams, args=(arguments.url, longest))
        reader.start()
        try:
            await asyncio.sleep(QUIET_SECONDS)
            failed = await measure(longest, client, arguments)
        finally:
            reader.kill()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
