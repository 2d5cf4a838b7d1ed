"""The routes /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from server_support import make_tokenizer, running

TOKENIZER = make_tokenizer()
MESSAGES = [{"role": "user", "content": "hello world"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with running(tmp_path_factory.mktemp("server")) as server, server.client() as client:
        yield client


def post(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("text", ["hello world", "é 🙂 日本", "", "hello " * 2000])
def test_tokens_of_a_prompt_round_trip(client: httpx.Client, text: str) -> None:
    answer = post(client, "/tokenize", prompt=text, model="fake")
    assert answer["tokens"] == TOKENIZER.encode(text, add_special_tokens=True).tolist()
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 512)
    assert post(client, "/detokenize", tokens=answer["tokens"]) == {"prompt": text}


def test_token_strings_are_returned_on_request(client: httpx.Client) -> None:
    answer = post(client, "/tokenize", prompt="hello world", return_token_strs=True)
    assert "".join(answer["token_strs"]) == "hello world"
    assert len(answer["token_strs"]) == answer["count"]


def test_messages_count_as_many_tokens_as_the_chat(client: httpx.Client) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    for more in ({}, {"tools": tools}, {"chat_template_kwargs": {"shout": True}}):
        count = post(client, "/tokenize", messages=MESSAGES, **more)["count"]
        chat = post(client, "/v1/chat/completions", messages=MESSAGES, max_tokens=1, **more)
        assert count == chat["usage"]["prompt_tokens"]


def test_generation_prompt_can_be_left_out(client: httpx.Client) -> None:
    ids = post(client, "/tokenize", messages=MESSAGES, add_generation_prompt=False)["tokens"]
    assert post(client, "/detokenize", tokens=ids) == {"prompt": "user: hello world"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a" * 200_000}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, 400]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
    ],
)
def test_wrong_fields_are_named(client: httpx.Client, path: str, body: Any, param: str) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param)


def test_other_models_are_not_found(client: httpx.Client) -> None:
    assert client.post("/tokenize", json={"prompt": "a", "model": "x"}).status_code == 404


def test_server_without_tokenizer_refuses_both(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("ids")
    with running(folder, has_tokenizer=False) as server, server.client() as client:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            assert client.post(path, json=body).status_code == 400
