"""Who may use the server: API keys, host names, origins and content types, checked before every route."""

from __future__ import annotations

import hashlib
import ipaddress
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from hmac import compare_digest
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tokenspeed_server.errors import ApiError
from tokenspeed_server.exchange import set_reason

Respond = Callable[[ApiError, str], ASGIApp]

# A page of another site can send these without asking the server first (a "simple request").
FORM_TYPES = frozenset({"application/x-www-form-urlencoded", "multipart/form-data", "text/plain"})
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
ANY = "*"

_tenant: ContextVar[str] = ContextVar("tenant", default="")


def current_tenant() -> str:
    """Return the tenant of the request that is being served; "" with one API key or none."""
    return _tenant.get()


@dataclass(frozen=True, slots=True)
class Access:
    """Who may use the server. Empty `allowed_hosts` allow any name."""

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()


def default_hosts(listens_on: str) -> tuple[str, ...]:
    """Return the names of this machine if the server listens on a loopback address, else none.

    A page whose domain points to 127.0.0.1 (DNS rebinding) names its own domain as the host.
    """
    return ("localhost", socket.gethostname().lower()) if is_loopback(listens_on) else ()


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to an address or name."""
    if host.lower() == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    with suppress(OSError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return all(ipaddress.ip_address(each[4][0]).is_loopback for each in found)
    return False


def split_keys(given: str | None) -> tuple[str, ...]:
    """Return the keys of `--api-key`, which are separated by commas."""
    return tuple(key for part in (given or "").split(",") if (key := part.strip()))


class AccessMiddleware:
    """Rejects unauthorized requests on every route, including unknown routes and routes of plugin middleware."""

    def __init__(
        self, app: ASGIApp, access: Access, public: Iterable[str], respond: Respond
    ) -> None:
        """`public` paths need no key. `respond` makes the response to an error on a path."""
        self._app = app
        self._access = access
        self._public = frozenset(public)
        self._respond = respond
        self._digests = [_digest(key.encode()) for key in access.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on if its client may use the server."""
        headers = Headers(scope=scope)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        try:
            self._check_source(scope["method"], headers)
            key = self._check_key(headers, path)
            _check_content(headers)
        except ApiError as error:
            set_reason(scope, error.message)
            await self._respond(error, path)(scope, receive, send)
            return
        if len(self._digests) > 1:
            _tenant.set(key)
        await self._app(scope, receive, send)

    def _check_source(self, method: str, headers: Headers) -> None:
        """Raise ApiError (403) for a host or a page of another site that is not allowed.

        With API keys, only the host is checked, since other sites do not know a key.
        """
        access, host = self._access, headers.get("host", "")
        if access.allowed_hosts and host and not _matches(host, access.allowed_hosts):
            raise ApiError(
                403,
                f"the host {host[:255]!r} is not allowed: use an IP address, or one of "
                f"{', '.join(access.allowed_hosts)}, or start the server with --allowed-hosts",
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        if access.api_keys or origin is None or method in SAFE_METHODS:
            return
        is_same = bool(host) and origin.partition("://")[2].lower() == host.lower()
        if not is_same and not {origin, ANY} & set(access.allowed_origins):
            raise ApiError(
                403,
                f"pages of the origin {origin[:255]!r} may not use this server: start it with "
                "--allowed-origins, or with an --api-key",
                code="origin_not_allowed",
            )

    def _check_key(self, headers: Headers, path: str) -> str:
        """Return the digest of the request's key, "" if none is needed. Raises ApiError (401)."""
        if not self._digests or path in self._public:
            return ""
        # Anthropic's clients send the key in the header x-api-key.
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = _digest(given.encode("latin-1"))
        # Compare with all keys: the time must not tell which one is close.
        matches = [compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise ApiError(
                401,
                "missing or wrong API key: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return digest.hex()[:16]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _matches(host: str, allowed: Iterable[str]) -> bool:
    """Whether a Host header names an IP address or one of the allowed hosts."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    with suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return any(
        each == ANY or name == each.lower() or (each[0] == "." and name.endswith(each.lower()))
        for each in allowed
    )


def _check_content(headers: Headers) -> None:
    """Raise ApiError (415) for a body that a form can send, or that is compressed."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in FORM_TYPES:
        raise ApiError(
            415,
            f"the content type is {kind}: send JSON with 'Content-Type: application/json'",
            code="unsupported_content_type",
        )
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(
            415,
            f"the content encoding {encoding[:40]!r} is not supported: send the body uncompressed",
            code="unsupported_content_encoding",
        )
