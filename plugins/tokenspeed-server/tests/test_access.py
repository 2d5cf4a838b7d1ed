"""Keys, hosts, origins and content types are checked on every route before anything else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from tokenspeed_server.access import (
    FORM_TYPES,
    Access,
    AccessMiddleware,
    current_tenant,
    default_hosts,
    is_loopback,
    split_keys,
)
from tokenspeed_server.errors import ApiError

LOCAL = Access(allowed_hosts=default_hosts("127.0.0.1"))
KEYS = Access(api_keys=("first key", "second"))
SITE = "http://evil.example"


def ask(
    access: Access, headers: dict[str, str], method: str = "POST", path: str = "/v1/x"
) -> tuple[int, str]:
    """Return the status of an answer, and its error's code or the tenant that the app saw."""
    sent: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(json.dumps({"error": {"code": current_tenant()}}))(scope, receive, send)

    def respond(error: ApiError, path: str) -> ASGIApp:
        return Response(error.body(), error.status)

    async def receive() -> Any:
        raise AssertionError("the body is not read")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(k.encode(), v.encode("latin-1")) for k, v in headers.items()],
    }
    asyncio.run(AccessMiddleware(app, access, ["/health"], respond)(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])["error"]["code"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer first key x"},
        {"authorization": "Basic second"},
        {"authorization": "Bearer \xe9"},
        {"authorization": "Bearer first key,second"},
        {"x-api-key": ""},
        {"x-api-key": "first"},
    ],
)
@pytest.mark.parametrize("path", ["/", "/v1/models", "/metrics", "/nothing", "//health", "/Health"])
def test_every_path_needs_a_key(headers: dict[str, str], path: str) -> None:
    assert ask(KEYS, headers, "GET", path) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer first key"},
        {"authorization": "bearer  second"},
        {"authorization": "BEARER second"},
        {"x-api-key": "second"},
    ],
)
def test_any_of_several_keys_is_accepted(headers: dict[str, str]) -> None:
    assert ask(KEYS, headers)[0] == 200
    assert ask(KEYS, {}, "GET", "/health")[0] == 200


def test_each_of_several_keys_is_a_tenant() -> None:
    tenants = {ask(KEYS, {"x-api-key": key})[1] for key in KEYS.api_keys}
    assert len(tenants) == 2
    assert "" not in tenants
    assert ask(Access(api_keys=("k",)), {"x-api-key": "k"}) == (200, "")
    assert current_tenant() == ""


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example"])
def test_rebound_name_is_refused_on_loopback(host: str) -> None:
    for method in ("GET", "POST"):
        assert ask(LOCAL, {"host": host}, method) == (403, "host_not_allowed")


@pytest.mark.parametrize("host", ["localhost:8000", "LOCALHOST", "127.0.0.1:1", "[::1]:8000", ""])
def test_names_of_this_machine_are_allowed(host: str) -> None:
    assert ask(LOCAL, {"host": host})[0] == 200


def test_allowed_hosts_can_be_named() -> None:
    access = Access(allowed_hosts=("llm.example", ".internal"))
    assert ask(access, {"host": "llm.example:443"})[0] == 200
    assert ask(access, {"host": "a.b.internal"})[0] == 200
    assert ask(access, {"host": "x.example"})[0] == 403
    assert ask(Access(allowed_hosts=("*",)), {"host": "x.example"})[0] == 200


@pytest.mark.parametrize(
    "origin", [SITE, "null", "http://localhost:1", "http://localhost.evil:8000"]
)
def test_page_of_another_site_cannot_post(origin: str) -> None:
    headers = {"host": "localhost:8000", "origin": origin}
    assert ask(LOCAL, headers) == (403, "origin_not_allowed")
    assert ask(LOCAL, headers, "GET")[0] == 200  # the browser keeps the answer from the page


def test_allowed_pages_can_post() -> None:
    same = {"host": "localhost:8000", "origin": "http://localhost:8000"}
    assert ask(LOCAL, same)[0] == 200
    other = {"host": "localhost:8000", "origin": SITE}
    assert ask(Access(allowed_origins=(SITE,)), other)[0] == 200
    assert ask(Access(allowed_origins=("*",)), other)[0] == 200
    assert ask(KEYS, {**other, "x-api-key": "second"})[0] == 200


@pytest.mark.parametrize("kind", sorted(FORM_TYPES))
def test_content_types_of_forms_are_refused(kind: str) -> None:
    for written in (kind, kind.upper(), f"{kind}; charset=utf-8"):
        assert ask(Access(), {"content-type": written}) == (415, "unsupported_content_type")
    assert ask(Access(), {"content-type": "application/json; charset=utf-8"})[0] == 200
    assert ask(Access(), {})[0] == 200


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, gzip"])
def test_compressed_bodies_are_refused(encoding: str) -> None:
    headers = {"content-encoding": encoding}
    assert ask(Access(), headers) == (415, "unsupported_content_encoding")


@given(st.dictionaries(st.sampled_from(["host", "origin", "authorization"]), st.text("a[]:/\\@ é")))
def test_odd_headers_never_raise(headers: dict[str, str]) -> None:
    for access in (LOCAL, KEYS):
        assert ask(access, headers)[0] in (200, 401, 403)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback_addresses_are_known(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("given", "keys"), [(None, ()), ("a", ("a",)), ("a, b c,", ("a", "b c")), (",", ())]
)
def test_keys_are_separated_by_commas(given: str | None, keys: Sequence[str]) -> None:
    assert split_keys(given) == keys
