"""Comparison of answers, and scores of a server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from tokenspeed_demo.items import Item, held_out_set
from tokenspeed_demo.score import is_right, message_text, over_http, score


def item(answer: str) -> Item:
    return Item("test", ({"role": "user", "content": "?"},), answer, frozenset())


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "x"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("2 + 2 = 4", "<think>\n2+2+0=4 carry 0\n</think>\n\n2 + 2 = 4"),
        ("2 + 2 = 4", "2 + 2 = 4<|im_end|>"),
        (CALL, CALL),
        (CALL, '<tool_call>{"arguments": {"b": "x", "a": 1}, "name": "f"}</tool_call>'),
    ],
)
def test_equal_answers_are_right(answer: str, text: str) -> None:
    assert is_right(item(answer), text)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("2 + 2 = 4", "2 + 2 = 5"),
        ("2 + 2 = 4", "<think>\n2 + 2 = 4"),
        ("one", "One"),
        (CALL, CALL.replace("1", "2")),
        (CALL, CALL + "\n" + CALL),
        (CALL, "Here: " + CALL),
        (CALL, CALL.replace("}}", "}")),
    ],
)
def test_different_answers_are_wrong(answer: str, text: str) -> None:
    assert not is_right(item(answer), text)


def test_parsed_and_written_tool_calls_are_equal() -> None:
    function = {"name": "f", "arguments": '{"a": 1, "b": "x"}'}
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    assert is_right(item(CALL), message_text(message))


@pytest.fixture
def server() -> Iterator[str]:
    """Yield the URL of a server that answers only the held-out copies."""
    known = {it.messages[-1]["content"]: it.answer for it in held_out_set("copy", 20)}

    class Handler(BaseHTTPRequestHandler):
        def reply(self, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.reply({"data": [{"id": "memorized"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert (body["model"], body["temperature"]) == ("memorized", 0)
            answer = known.get(body["messages"][-1]["content"], "I do not know.")
            self.reply({"choices": [{"message": {"role": "assistant", "content": answer}}]})

        def log_request(self, code: object = "-", size: object = "-") -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}/v1"
        httpd.shutdown()


def test_server_is_scored(server: str) -> None:
    results = score(over_http(server, "", "none", 4), ["copy", "extract"], 20, 0)
    assert results["copy"]["exact"] == 1
    assert results["extract"]["exact"] == 0
    assert results["extract"]["items"] == 20


def test_unreachable_server_is_an_error() -> None:
    httpx = pytest.importorskip("httpx")
    with pytest.raises(httpx.ConnectError):
        over_http("http://127.0.0.1:9/v1", "m", "none", 1)(held_out_set("copy", 1))
