"""One HTTP request and its response: the ids, and the line in the log."""

from __future__ import annotations

import logging
import time
import uuid
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Message, Scope

from tokenspeed_core.commands.serving import log_fields

EXCHANGE = "tokenspeed.exchange"  # the key of the `Exchange` in an ASGI scope
# Polled by monitoring systems and by the dashboard.
PROBES = frozenset({"/health", "/ready", "/metrics", "/v1/stats"})
_EXPECTED_OF_PROBES = (200, 503)
CLIENT_LEFT = "the client disconnected"
_MAX_LABEL = 128  # characters of the client's own request id that are kept
_MAX_REASON = 500  # characters of a reason in the log
_MAX_PATH = 500  # characters of a path in the log

log = logging.getLogger("tokenspeed.http")


@dataclass(slots=True)
class Exchange:
    """A request from its arrival to its end.

    `request_id` is made by the server; the client's X-Request-Id is only a label. `reason` says why the
    request failed.
    """

    method: str
    path: str
    client: str
    request_id: str
    client_request_id: str
    started_at: float  # on the monotonic clock, in seconds
    status: int = 0  # 0 until the response starts
    reason: str = ""

    @classmethod
    def begin(cls, scope: Scope) -> Exchange:
        """Return the exchange of a request that has just arrived, and add it to the scope."""
        label = Headers(scope=scope).get("x-request-id", "")[:_MAX_LABEL]
        exchange = cls(
            scope["method"],
            scope["path"],
            scope["client"][0] if scope.get("client") else "",
            uuid.uuid4().hex,
            "".join(each for each in label if each.isprintable()),
            time.monotonic(),
        )
        scope[EXCHANGE] = exchange
        return exchange

    @property
    def is_uneventful_probe(self) -> bool:
        """Whether a probe was answered as its sender expects, so that no line is needed."""
        return self.path in PROBES and self.status in _EXPECTED_OF_PROBES

    def start_response(self, message: Message) -> None:
        """Record the status and add the id to the headers of an `http.response.start` message."""
        self.status = message["status"]
        request_id = self.request_id.encode()
        headers = [*message.get("headers", ()), (b"x-request-id", request_id)]
        if self.path.startswith("/v1/messages"):
            headers.append((b"request-id", request_id))  # which Anthropic's clients read
        message["headers"] = headers

    def log_end(self) -> None:
        """Log the request in one line, unless it is a probe."""
        if self.is_uneventful_probe:
            return
        seconds = time.monotonic() - self.started_at
        reason = " ".join(self.reason.split())[:_MAX_REASON]
        label = f" ({self.client_request_id})" if self.client_request_id else ""
        path = self.path[:_MAX_PATH]
        log.log(
            logging.WARNING if self.status >= 500 else logging.INFO,
            "%s %s %s %.3f s%s%s",
            self.method,
            path.replace("\n", "\\n"),
            self.status or "no response",
            seconds,
            label,
            f": {reason}" if reason else "",
            extra=log_fields(
                method=self.method,
                path=path,
                client=self.client,
                status=self.status,
                seconds=round(seconds, 6),
                client_request_id=self.client_request_id,
                reason=reason,
            ),
        )


def set_reason(scope: Scope, reason: str) -> None:
    """Record why a request failed. Without an exchange in the scope, do nothing."""
    exchange: Exchange | None = scope.get(EXCHANGE)
    if exchange is not None:
        exchange.reason = reason
