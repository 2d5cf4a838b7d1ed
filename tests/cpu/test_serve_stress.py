"""Forty clients on a server with a small KV pool; some disconnect early."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Served, served, wait_until_idle

pytestmark = pytest.mark.slow

NUM_REQUESTS, NUM_PROMPTS, MAX_TOKENS = 160, 24, 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve in float32, where batching changes no token, with KV blocks for four long sequences."""
    flags = "--dtype float32 --max-total-tokens 640 --max-model-len 320 --block-size 4 --chunked-prefill-size 24 "
    folder: Path = tmp_path_factory.mktemp("stress")
    with served(folder, *flags.split(), "--max-num-seqs", "12") as running:
        yield running


class Load:
    """Sends various requests and compares each greedy text with that of a single client."""

    def __init__(self, server: Served) -> None:
        self.random = random.Random(1)
        shared = [self.random.randrange(300, 900) for _ in range(120)]
        self.prompts = [
            shared[: self.random.randrange(1, 120)]
            + [self.random.randrange(300, 900) for _ in range(self.random.randrange(1, 60))]
            for _ in range(NUM_PROMPTS)
        ]
        self.server = server
        self.num_disconnected = self.num_answered = 0
        self.alone: list[str] = []

    def send_alone(self) -> None:
        """Record the answer to each prompt alone."""
        with self.server.http() as http:
            for prompt in self.prompts:
                body = {
                    "prompt": prompt,
                    "max_tokens": MAX_TOKENS,
                    "temperature": 0,
                    "ignore_eos": True,
                }
                self.alone.append(
                    http.post("/v1/completions", json=body).json()["choices"][0]["text"]
                )

    async def send_all(self) -> None:
        """Send all requests over forty connections."""
        limits = httpx.Limits(max_connections=40)
        async with httpx.AsyncClient(
            base_url=self.server.url, trust_env=False, timeout=60, limits=limits
        ) as client:
            gate = asyncio.Semaphore(40)

            async def one() -> None:
                async with gate:
                    await self.send(client)

            await asyncio.gather(*(one() for _ in range(NUM_REQUESTS)))

    async def send(self, client: httpx.AsyncClient) -> None:
        """Send one request: streamed or not, some sampled, some closed early."""
        chance = self.random.random
        number = self.random.randrange(NUM_PROMPTS)
        body: dict[str, Any] = {
            "prompt": self.prompts[number],
            "max_tokens": self.random.randrange(1, MAX_TOKENS + 1),
            "temperature": 0,
            "ignore_eos": True,
            "n": self.random.choice([1, 1, 1, 2, 3]),
            "stream": chance() < 0.4,
        }
        body |= {"logprobs": self.random.randrange(4)} if chance() < 0.3 else {}
        other = {"temperature": 1.0, "top_p": 0.9} if chance() < 0.5 else {"presence_penalty": 0.5}
        is_plain = chance() < 0.7
        body |= {} if is_plain else other
        if chance() < 0.2:
            texts = await self.disconnect(client, body)
        elif body["stream"]:
            texts = await self.stream(
                client, body, self.random.randrange(1, 80) if chance() < 0.5 else None
            )
        else:
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            assert response.json()["usage"]["completion_tokens"] == body["max_tokens"] * body["n"]
            texts = [choice["text"] for choice in response.json()["choices"]]
        for text in texts if is_plain else ():
            assert self.alone[number].startswith(text.rstrip("\ufffd"))
        self.num_answered += bool(texts)

    async def disconnect(self, client: httpx.AsyncClient, body: dict[str, Any]) -> list[str]:
        """Disconnect before the answer."""
        try:
            await client.post("/v1/completions", json=body, timeout=0.3 * self.random.random())
        except httpx.TimeoutException:
            self.num_disconnected += 1
        return []

    async def stream(
        self, client: httpx.AsyncClient, body: dict[str, Any], disconnects_after: int | None
    ) -> list[str]:
        """Read events, all of them or some."""
        texts, num_events = [""] * body["n"], 0
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] += choice["text"]
                num_events += 1
                if num_events == disconnects_after:
                    self.num_disconnected += 1
                    break
        return texts


@pytest.mark.release
def test_concurrent_answers_equal_sequential_answers(
    server: Served,
) -> None:
    load = Load(server)
    load.send_alone()
    asyncio.run(load.send_all())
    assert load.num_disconnected > 10
    assert load.num_answered > 80
    wait_until_idle([server.engine()])
    with server.http() as http:  # This request needs every block.
        whole = {
            "prompt": [5] * 10,
            "max_tokens": 310,
            "ignore_eos": True,
            "n": 2,
            "temperature": 0,
        }
        assert http.post("/v1/completions", json=whole).json()["usage"]["completion_tokens"] == 620
        assert http.get("/health").status_code == 200
    assert "Traceback" not in server.stderr()
