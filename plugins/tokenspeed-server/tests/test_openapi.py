"""Answers have the shapes that the OpenAPI description gives."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import jsonschema
import pytest
from server_support import TEMPLATE, make_tokenizer
from tokenspeed_server.app import App, create_app
from tokenspeed_server.echo_client import EchoClient
from tokenspeed_server.service import Options, Service

from tokenspeed_core.commands.serving import ModelText
from tokenspeed_core.text import ChatTemplate

USER = [{"role": "user", "content": "hello"}]
ASKED: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/v1/completions", {"prompt": "hello", "max_tokens": 3}),
    ("POST", "/v1/completions", {"prompt": 3}),
    ("POST", "/v1/chat/completions", {"messages": USER, "max_tokens": 3}),
    ("POST", "/v1/chat/completions", {"messages": []}),
    ("POST", "/v1/messages", {"messages": USER, "max_tokens": 3}),
    ("POST", "/v1/messages", {"messages": USER}),
    ("POST", "/v1/messages/count_tokens", {"messages": USER}),
    ("POST", "/v1/responses", {"input": "hello", "max_output_tokens": 16}),
    ("POST", "/tokenize", {"prompt": "hello", "return_token_strs": True}),
    ("POST", "/detokenize", {"tokens": [5, 6]}),
    ("GET", "/v1/models", {}),
    ("GET", "/v1/models/fake", {}),
    ("GET", "/v1/models/other", {}),
    ("GET", "/v1/stats", {}),
    ("GET", "/version", {}),
    ("GET", "/health", {}),
    ("GET", "/ready", {}),
    ("GET", "/v1/responses/{id}", {}),
    ("GET", "/v1/responses/{id}/input_items", {}),
    ("GET", "/v1/responses/{id}/input_items?limit=x", {}),
    ("POST", "/v1/responses/{id}/cancel", {}),
    ("DELETE", "/v1/responses/{id}", {}),
    ("GET", "/v1/responses/{id}", {}),
]


@pytest.fixture(scope="module")
def exchanged() -> tuple[dict[str, Any], list[httpx.Response]]:
    """Return the description of an app that echoes prompts, and its answers."""
    return asyncio.run(exchange())


async def exchange() -> tuple[dict[str, Any], list[httpx.Response]]:
    tokenizer, engine = make_tokenizer(), EchoClient()
    service = Service(Options("fake"), engine)
    template = ChatTemplate(TEMPLATE, tokenizer.special_tokens)
    service.open(ModelText(tokenizer, template), engine.ready.result())
    app = create_app(service)
    try:
        return app.openapi(), await answers(app)
    finally:
        service.close()
        engine.close()


async def answers(app: App) -> list[httpx.Response]:
    """Return the answers to all requests; `{id}` is that of the response made before."""
    found, response_id = [], ""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        for method, path, body in ASKED:
            url = path.replace("{id}", response_id)
            sent = client.request(method, url, json=body or None)
            answer = await asyncio.wait_for(sent, 60)
            if path == "/v1/responses":
                response_id = answer.json()["id"]
            found.append(answer)
    return found


def test_answers_fit_their_description(
    exchanged: tuple[dict[str, Any], list[httpx.Response]],
) -> None:
    described, found = exchanged
    for (method, path, _), answer in zip(ASKED, found, strict=True):
        route = path.partition("?")[0].replace("{id}", "{response_id}")
        if route.startswith("/v1/models/"):
            route = "/v1/models/{model_id}"
        responses = described["paths"][route][method.lower()]["responses"]
        schema = responses[str(answer.status_code)]["content"]["application/json"]["schema"]
        assert "$ref" in schema, route
        jsonschema.validate(answer.json(), {**schema, "components": described["components"]})


def test_every_json_answer_has_a_schema(
    exchanged: tuple[dict[str, Any], list[httpx.Response]],
) -> None:
    described, _ = exchanged
    for path, operations in described["paths"].items():
        for operation in operations.values():
            responses = operation["responses"]
            assert "422" not in responses
            if path.endswith("/cancel"):
                continue  # it has no answer but errors
            for response in responses.values():
                assert response["content"].get("application/json", {"schema": 1})["schema"], path
