"""The request ids and the line per HTTP request."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from server_support import TEMPLATE, make_tokenizer
from tokenspeed_server.app import create_app
from tokenspeed_server.echo_client import EchoClient
from tokenspeed_server.service import Options, Service

from tokenspeed_core.commands.serving import ModelText
from tokenspeed_core.logs import JsonFormatter
from tokenspeed_core.text import ChatTemplate

PROMPT = {"prompt": "hello", "max_tokens": 5}


def ask(
    *requests: tuple[str, str, dict[str, Any]],
    headers: dict[str, str] | None = None,
    **options: Any,
) -> list[httpx.Response]:
    """Send requests (method, path, body) to an app that echoes prompts; return the responses."""

    async def exchange() -> list[httpx.Response]:
        tokenizer = make_tokenizer()
        engine = EchoClient()
        service = Service(Options("fake", **options), engine)
        template = ChatTemplate(TEMPLATE, tokenizer.special_tokens)
        service.open(ModelText(tokenizer, template), engine.ready.result())
        try:
            transport = httpx.ASGITransport(create_app(service), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                return [
                    await client.request(method, path, json=body or None, headers=headers)
                    for method, path, body in requests
                ]
        finally:
            service.close()
            engine.close()

    return asyncio.run(exchange())


@contextmanager
def lines() -> Iterator[list[dict[str, Any]]]:
    """Collect the JSON lines of the HTTP log."""
    found: list[dict[str, Any]] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(json.loads(self.format(record)))

    handler, log = Collect(), logging.getLogger("tokenspeed.http")
    handler.setFormatter(JsonFormatter("server"))
    log.addHandler(handler)
    before = log.level
    log.setLevel(logging.INFO)
    try:
        yield found
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/completions", PROMPT, 200),
        ("POST", "/v1/completions", {**PROMPT, "stream": True}, 200),
        ("POST", "/v1/completions", {**PROMPT, "max_tokens": -1}, 400),
        ("GET", "/nothing", {}, 404),
        ("GET", "/v1/models", {}, 200),
    ],
)
def test_each_request_has_one_line_with_its_id(
    method: str, path: str, body: dict[str, Any], status: int
) -> None:
    with lines() as found:
        (response,) = ask((method, path, body))
    (line,) = found
    assert (line["method"], line["path"], line["status"]) == (method, path, status)
    assert line["request_id"] == response.headers["x-request-id"]
    assert line["seconds"] >= 0


def test_refused_request_is_logged_with_its_reason() -> None:
    with lines() as found:
        (response,) = ask(("POST", "/v1/completions", {**PROMPT, "max_tokens": -1}))
    assert found[0]["reason"] == response.json()["error"]["message"]
    with lines() as found:
        ask(("GET", "/v1/models", {}), api_key="secret")
    assert found[0]["status"] == 401
    assert "key" in found[0]["reason"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/nowhere"),
        ("PUT", "/v1/models"),
        ("GET", "/v1/responses/x/input_items?limit=1e5"),
        ("GET", "/v1/models/other"),
    ],
)
def test_line_of_a_wrong_address_has_its_reason(method: str, path: str) -> None:
    with lines() as found:
        (response,) = ask((method, path, {}))
    assert response.status_code in (400, 404, 405)
    assert found[0]["reason"] == response.json()["error"]["message"]


def test_line_of_a_long_path_is_short() -> None:
    with lines() as found:
        ask(("GET", "/v1/models/" + "a" * 20_000, {}))
    assert len(json.dumps(found[0])) < 3000


def test_probes_have_no_lines() -> None:
    with lines() as found:
        responses = ask(*(("GET", path, {}) for path in ("/health", "/ready", "/v1/stats")))
    assert all(response.headers["x-request-id"] for response in responses)
    assert found == []
    with lines() as found:
        ask(("GET", "/metrics", {}), api_key="secret")
    assert found[0]["status"] == 401


def test_client_id_is_a_label_and_never_the_id() -> None:
    label = "trace\n-7" + "x" * 500
    with lines() as found:
        (response,) = ask(
            ("POST", "/v1/completions", PROMPT),
            headers={"X-Request-Id": label.replace("\n", "\x07")},
        )
    assert found[0]["client_request_id"].startswith("trace-7xxx")
    assert len(found[0]["client_request_id"]) < 200
    assert found[0]["client_request_id"] not in response.headers["x-request-id"]
    assert response.headers.get_list("x-request-id") == [found[0]["request_id"]]


def test_answer_and_header_share_an_id() -> None:
    first, second = ask(("POST", "/v1/completions", PROMPT), ("POST", "/v1/completions", PROMPT))
    assert first.json()["id"] == f"cmpl-{first.headers['x-request-id']}"
    assert first.json()["id"] != second.json()["id"]


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_log_of_requests_grows_with_its_level(caplog: pytest.LogCaptureFixture, level: int) -> None:
    caplog.set_level(logging.INFO, "tokenspeed.requests")
    prompt = "hello world" * 400
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0.5}
    (response,) = ask(("POST", "/v1/completions", body), request_log_level=level)
    (record,) = [each for each in caplog.records if each.name == "tokenspeed.requests"]
    found = record.fields  # type: ignore[attr-defined]
    assert found["id"] == response.json()["id"]
    assert found["output_tokens"] > 0
    assert found.get("parameters", {}).get("temperature") == (0.5 if level else None)
    text = found.get("prompts", [""])[0]
    assert prompt.startswith(text)
    assert (len(text) == 0, len(text) == len(prompt)) == (level < 2, level == 3)
    assert bool(found.get("outputs", [""])[0]) is (level >= 2)
