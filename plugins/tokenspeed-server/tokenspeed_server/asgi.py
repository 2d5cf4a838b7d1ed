"""Requests to an application in this process, without a socket."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message

log = logging.getLogger("tokenspeed.http")


@dataclass(slots=True)
class Answer:
    """An HTTP response."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)  # names in lower case
    body: bytes = b""


async def post(app: ASGIApp, path: str, body: bytes, *, log_level: int = logging.ERROR) -> Answer:
    """Send a JSON body and return the whole answer.

    Unexpected errors of the application are logged at `log_level`; their answers are a 500.
    """
    answer, parts = Answer(), []
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else await asyncio.Event().wait()  # type: ignore[return-value]

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {
                name.decode("latin-1").lower(): value.decode("latin-1")
                for name, value in message["headers"]
            }
        else:
            parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": None,
        "server": ("127.0.0.1", 80),
    }
    try:
        await app(scope, receive, send)
    except Exception:
        # The framework sends the 500, and raises the error for the server to log.
        if not answer.status:
            raise
        log.log(log_level, "a request to %s failed", path, exc_info=True)
    answer.body = b"".join(parts)
    return answer
