"""Bad requests get a 4xx that names the field; the server goes on."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import fake_engine
import httpx
import pytest
import scripted
from server_support import Running, running

from tokenspeed_core.errors import RequestFailedError
from tokenspeed_core.text import ChatTemplate

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    options = {"api_key": "secret key", "max_body_bytes": 100_000}
    with running(tmp_path_factory.mktemp("server"), options=options) as server:
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with server.client(headers={"authorization": "Bearer secret key"}) as client:
        yield client
        again = client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2})
        assert again.status_code == 200


def refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """Check the shape of an error response and return the error."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    return dict(error)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("temperature", -1, "greater than or equal to 0"),
        ("temperature", "hot", "valid number"),
        ("top_p", 0, "greater than 0"),
        ("top_p", 1.5, "less than or equal to 1"),
        ("top_k", -2, "greater than or equal to -1"),
        ("top_k", 2.5, "integer"),
        ("min_p", 2, "less than or equal to 1"),
        ("n", 0, "greater than or equal to 1"),
        ("n", 10**30, "less than or equal to 128"),
        ("n", True, "integer"),
        ("max_tokens", -1, "greater than or equal to 0"),
        ("max_tokens", 10_000, "max_tokens"),
        ("min_tokens", -1, "greater than or equal to 0"),
        ("min_tokens", 17, "at most 16"),
        ("presence_penalty", 3, "less than or equal to 2"),
        ("repetition_penalty", 0, "greater than or equal to 0.01"),
        ("repetition_penalty", 5e-324, "greater than or equal to 0.01"),
        ("repetition_penalty", 1e-38, "greater than or equal to 0.01"),
        ("seed", 2**63, "less than or equal to"),
        ("logprobs", 21, "less than or equal to 20"),
        ("stop", ["a"] * 17, "at most 16"),
        ("stop", "", "at least 1"),
        ("stop", [7], "string"),
        ("stop_token_ids", [400], "0 to 399"),
        ("stop_token_ids", [-1], "greater than or equal to 0"),
        ("logit_bias", {"400": 1}, "0 to 399"),
        ("logit_bias", {"5": 101}, "less than or equal to 100"),
        ("logit_bias", {"x": 1}, "integer"),
        ("logit_bias", {str(i): 1 for i in range(301)}, "at most 300"),
        ("stream", "yes", "boolean"),
        ("cache_salt", "x" * 257, "at most 256"),
        ("priority", 1, "--schedule-policy priority"),
        ("stream_options", {"include_usage": True}, "stream"),
        ("prompt", [], ""),
        ("prompt", "", ""),
        ("prompt", [[]], ""),
        ("prompt", ["a", "", "b"], "prompt[1]"),
        ("prompt", [[1], [400]], "prompt[1]"),
        ("prompt", [400], "0 to 399"),
        ("prompt", [-1], "0 to 399"),
        ("prompt", [2**40], "32-bit"),
        ("prompt", [1, True], "integer"),
        ("prompt", [1.0], "integer"),
        ("prompt", ["a", [1]], ""),
        ("prompt", {"a": 1}, "dict"),
        ("prompt", [1] * 512, "512"),
        ("prompt", ["a"] * 513, "512"),
        ("echo", "yes", "bool"),
        ("logits_processors", {"x": {}}, "--enable-custom-logit-processor"),
        ("logits_processors", ["module.Class"], ""),
        ("suffix", "x", ""),
        ("best_of", 2, ""),
        ("temprature", 1, "temperature"),
    ],
)
def test_bad_completion_field_is_named(
    client: httpx.Client, field: str, value: Any, said: str
) -> None:
    error = refusal(client.post("/v1/completions", json={"prompt": "hello", field: value}))
    assert error["param"] is not None
    assert error["param"].split("[")[0].split(".")[0] == field
    assert said in error["message"], error["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "contents": "x"}]}, "messages[0].contents"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"chat_template_kwargs": {"messages": []}}, "messages"),
        ({"chat_template_kwargs": {"nonsense": 1}}, "messages"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"functions": []}, "functions"),
        ({"stream": True, "stream_options": {"includeUsage": True}}, "stream_options.includeUsage"),
        ({"store": "yes"}, "store"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
)
def test_bad_chat_field_is_named(client: httpx.Client, change: dict[str, Any], param: str) -> None:
    error = refusal(client.post("/v1/chat/completions", json={"messages": USER, **change}))
    assert (error["param"] or "").startswith(param), error


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_media_parts_are_refused_by_name(client: httpx.Client, kind: str) -> None:
    parts = [{"type": "text", "text": "x"}, {"type": kind, kind: {}}]
    body = {"messages": [{"role": "user", "content": parts}]}
    error = refusal(client.post("/v1/chat/completions", json=body))
    assert (error["param"], error["code"]) == ("messages[0].content[1].type", "unsupported")
    assert kind in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"prompt": "a"',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 20_000,
        b'{"a":' * 20_000,
        b"9" * 5000,
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_malformed_body_is_a_400(client: httpx.Client, path: str, body: bytes) -> None:
    refusal(client.post(path, content=body))


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
def test_non_finite_number_names_its_field(client: httpx.Client, number: bytes) -> None:
    error = refusal(
        client.post("/v1/completions", content=b'{"prompt": "a", "temperature": ' + number + b"}")
    )
    assert error["param"] == "temperature"


def test_null_field_is_treated_as_missing(client: httpx.Client) -> None:
    nulls = dict.fromkeys(
        ["temperature", "stop", "echo", "logprobs", "stream_options", "user", "max_tokens"]
    )
    assert client.post("/v1/completions", json={"prompt": "hi", **nulls}).status_code == 200


def test_large_body_is_a_413(server: Running) -> None:
    headers = {"authorization": "Bearer secret key"}
    with server.client(headers=headers) as client:
        refusal(client.post("/v1/completions", content=b"x" * 100_001), 413)
        refusal(client.post("/v1/completions", content=(b"x" * 10_000 for _ in range(20))), 413)


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/completions", "/openapi.json", "/nothing", "/%2Fhealth", "/Health"]
)
@pytest.mark.parametrize(
    "key", [None, "Bearer wrong", "Bearer", "Bearer secret key x", "Basic secret key", "é"]
)
def test_every_route_but_public_ones_needs_the_key(
    server: Running, path: str, key: str | None
) -> None:
    headers = {} if key is None else {b"authorization": key.encode()}
    with server.client() as client:
        refusal(client.request("GET", path, headers=headers), 401)


def test_probes_and_pages_need_no_key(server: Running) -> None:
    with server.client() as client:
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/ready").json() == {"status": "ready"}
        for page in ("/", "/dashboard", "/docs"):
            assert client.get(page).headers["content-type"].startswith("text/html")
        for path in ("/health", "/ready"):
            answer = client.head(path)
            assert (answer.status_code, answer.content) == (200, b"")


def test_unknown_route_method_and_model(client: httpx.Client) -> None:
    refusal(client.get("/v1/nothing"), 404)
    assert "POST" in refusal(client.get("/v1/completions"), 405)["message"]
    refusal(client.post("/health"), 405)
    for response in (
        client.post("/v1/completions", json={"prompt": "a", "model": "x"}),
        client.get("/v1/models/x"),
    ):
        error = refusal(response, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "'fake'" in error["message"]


@pytest.mark.parametrize("streams", [True, False])
def test_full_queue_is_a_429(client: httpx.Client, streams: bool) -> None:
    body = {"prompt": [fake_engine.QUEUE_FULL], "stream": streams}
    response = client.post("/v1/completions", json=body)
    assert refusal(response, 429)["code"] == "queue_full"
    assert int(response.headers["retry-after"]) > 0


@pytest.mark.parametrize("streams", [True, False])
def test_failed_sequence_is_a_500(client: httpx.Client, streams: bool) -> None:
    body = {"prompt": [fake_engine.ERRS, 5], "stream": streams}
    refusal(client.post("/v1/completions", json=body), 500)


def test_endless_headers_are_cut_off(server: Running, client: httpx.Client) -> None:
    with raw_connection(server) as raw, pytest.raises(OSError, match=r"reset|[Bb]roken"):
        raw.sendall(b"GET /health HTTP/1.1\r\nx: " + b"y" * 64_000_000)


def test_invalid_http_is_a_400(server: Running, client: httpx.Client) -> None:
    with raw_connection(server) as raw:
        raw.sendall(b"GARBAGE\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 400")


def raw_connection(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def test_parameters_reach_the_engine(server: Running, client: httpx.Client) -> None:
    client.post("/v1/completions", json={"prompt": "a", "seed": 41, "n": 3, "max_tokens": 1})
    server.wait_for("x3 seed=41 t=0.7")


def test_error_quotes_odd_field_names(client: httpx.Client) -> None:
    response = client.post("/v1/completions", json={"prompt": "a", 'temperature"\n\u2028': 1})
    assert json.loads(response.content)["error"]["code"] == "unknown_field"


def test_unavailable_template_process_gives_status_503(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def render(*arguments: Any, **options: Any) -> str:
        raise RequestFailedError("unavailable", "the chat template's process ended; try again")

    async def test() -> None:
        with scripted.scripted() as (app, _):
            async with scripted.http(app) as client:
                monkeypatch.setattr(ChatTemplate, "render", render)
                body = {"messages": [{"role": "user", "content": "Hi"}]}
                answer = await client.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert answer.headers["retry-after"] == "1"

    scripted.run(test)
