"""A batch that a running server answers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import IO

from tokenspeed_core.commands.serving import ConfigError
from tokenspeed_server.asgi import Answer
from tokenspeed_server.batch.files import check_paths, file_runner, run_on_files, stop_on_signals
from tokenspeed_server.batch.http_client import HttpClient
from tokenspeed_server.batch.runner import Counts

MAX_BODY_BYTES = 64 << 20  # read at once; the server also limits it
_LINE_BREAKS = bytes.maketrans(b"\r\n", b"  ")


def run(
    url: str,
    api_key: str | None,
    source: Path,
    target: Path,
    *,
    overwrite: bool,
    concurrency: int,
) -> int:
    """Send the requests of a file to a server; return the exit status: 0 if all succeeded, 1 if some failed.

    Raises ConfigError for wrong paths or a wrong address, and ServerLostError.
    """
    check_paths(source, target, overwrite=overwrite)
    client = HttpClient(url, api_key)
    asyncio.run(check_server(client))  # before the file of results is made
    batch = OnlineBatch(client, concurrency)
    return run_on_files(source, target, batch.run, lambda: batch.counts, overwrite=overwrite)


class OnlineBatch:
    """One run over HTTP."""

    def __init__(self, client: HttpClient, concurrency: int) -> None:
        """Send at most `concurrency` requests concurrently."""
        self.counts = Counts()
        self._client = client
        self._concurrency = concurrency

    async def run(self, reading: IO[bytes], writing: IO[bytes]) -> bool:
        """Answer the lines of `reading`; return whether all were answered. Raises ServerLostError."""
        stopped = stop_on_signals()
        try:
            runner, bar = file_runner(
                self._post,
                reading,
                writing,
                concurrency=self._concurrency,
                max_body_bytes=MAX_BODY_BYTES,
            )
            self.counts = runner.counts
            with bar:
                return await runner.run(stopped)
        finally:
            await self._client.close()

    async def _post(self, path: str, body: bytes) -> Answer:
        answer = await self._client.post(path, body)
        answer.body = _in_one_line(answer.body)
        return answer


def _in_one_line(body: bytes) -> bytes:
    """Return JSON without line breaks; anything else, such as the page of a proxy, as a JSON string."""
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return json.dumps(body.decode("utf-8", "replace")).encode()
    return body.translate(_LINE_BREAKS)  # strings in JSON have none


async def check_server(client: HttpClient) -> None:
    """Raise ConfigError unless the server has OpenAI's API and accepts the key, and ServerLostError without one."""
    try:
        answer = await client.get("/v1/models")
    finally:
        await client.close()
    if answer.status == 401:
        raise ConfigError(
            f"{client.url} refuses the API key. Pass --api-key or set TOKENSPEED_API_KEY."
        )
    if answer.status != 200:
        raise ConfigError(
            f"{client.url} has no OpenAI API: /v1/models returned status {answer.status}."
        )
