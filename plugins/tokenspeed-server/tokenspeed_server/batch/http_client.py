"""A client of a running server: whole requests and whole answers over reused connections."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import h11

from tokenspeed_core.commands.serving import ConfigError, TokenSpeedError
from tokenspeed_server.asgi import Answer

_READ_BYTES = 1 << 16
_SPACES = frozenset(" \t\r\n")


class ServerLostError(TokenSpeedError):
    """The server cannot be reached, or a connection to it broke."""


class _ClosedEarlyError(Exception):
    """The server closed the connection before its answer began."""


@dataclass(frozen=True, slots=True, eq=False)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    state: h11.Connection

    async def close(self) -> None:
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()


class HttpClient:
    """Sends requests to the server at a URL, with or without a scheme, which may end in `/v1`."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Connect to nothing yet. Raises ConfigError for a URL that is no HTTP address, and for a wrong key."""
        with_scheme = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(with_scheme)
            is_whole = bool(parts.hostname) and parts.port != 0 and with_scheme.isascii()
            (parts.hostname or "").encode("idna")  # as a connection does; raises UnicodeError
        except ValueError:
            is_whole = False
        if not is_whole or parts.scheme not in ("http", "https") or set(url) & _SPACES:
            raise ConfigError(
                f"--url {url!r} is not an HTTP address. Pass one such as http://127.0.0.1:8000."
            )
        self.url = with_scheme.rstrip("/").removesuffix("/v1")
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._root = urlsplit(self.url).path
        self._headers = [("Host", parts.netloc.rpartition("@")[2])]
        if api_key:
            if not (api_key.isascii() and api_key.isprintable()):
                raise ConfigError(
                    "the API key contains characters that are not allowed in an HTTP header."
                )
            self._headers.append(("Authorization", f"Bearer {api_key}"))
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> Answer:
        """Return the answer to a GET. Raises ServerLostError."""
        return await self._request("GET", path, b"")

    async def post(self, path: str, body: bytes) -> Answer:
        """Return the answer to a JSON body. Raises ServerLostError."""
        return await self._request("POST", path, body)

    async def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            await self._idle.pop().close()

    async def _request(self, method: str, path: str, body: bytes) -> Answer:
        while self._idle:  # the server may have closed any of them
            with suppress(_ClosedEarlyError):
                return await self._exchange(self._idle.pop(), method, path, body)
        try:
            return await self._exchange(await self._connect(), method, path, body)
        except _ClosedEarlyError as error:
            raise ServerLostError(f"{self.url} closed the connection without a response") from error

    async def _connect(self) -> _Connection:
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._ssl)
        except OSError as error:
            reason = error.strerror or error
            raise ServerLostError(
                f"no server at {self.url} ({reason}). Start one with `tokenspeed serve`, or remove --url."
            ) from error
        return _Connection(reader, writer, h11.Connection(h11.CLIENT))

    async def _exchange(
        self, connection: _Connection, method: str, path: str, body: bytes
    ) -> Answer:
        is_kept = False
        try:
            await self._send(connection, method, path, body)
            answer = await self._receive(connection)
            if connection.state.states == {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE}:
                connection.state.start_next_cycle()
                self._idle.append(connection)
                is_kept = True
            return answer
        except h11.ProtocolError as error:
            raise ServerLostError(f"{self.url} did not respond with HTTP/1.1: {error}") from error
        finally:
            if not is_kept:
                await connection.close()

    async def _send(self, connection: _Connection, method: str, path: str, body: bytes) -> None:
        headers = [
            *self._headers,
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
        ]
        request = h11.Request(method=method, target=self._root + path, headers=headers)
        for event in (request, h11.Data(data=body), h11.EndOfMessage()):
            connection.writer.write(connection.state.send(event) or b"")
        with suppress(OSError):  # an answer may have come before the end of the body
            await connection.writer.drain()

    async def _receive(self, connection: _Connection) -> Answer:
        """Return an answer. Raises _ClosedEarlyError, ServerLostError, and h11.RemoteProtocolError."""
        answer, parts = Answer(), []
        while True:
            event = connection.state.next_event()
            if event is h11.NEED_DATA:
                try:
                    data = await connection.reader.read(_READ_BYTES)
                except OSError:  # reset, timed out, or wrong TLS
                    data = b""
                if not data and not answer.status:
                    raise _ClosedEarlyError
                if not data:
                    raise ServerLostError(f"{self.url} closed the connection during a response")
                connection.state.receive_data(data)
            elif isinstance(event, h11.Response):
                answer.status = event.status_code
                answer.headers = {
                    name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers
                }
            elif isinstance(event, h11.Data):
                parts.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                answer.body = b"".join(parts)
                return answer
