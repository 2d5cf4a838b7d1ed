"""Answers of the generation routes, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from server_support import Running, make_tokenizer, running, wait_until

TOKENIZER = make_tokenizer()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def sdk(server: Running) -> openai.OpenAI:
    http = httpx.Client(trust_env=False, verify=False)
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="any", http_client=http, max_retries=0
    )


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a stream's events; it must end in [DONE]."""
    response = client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_completion_has_text_usage_and_reason(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json={"prompt": "hello world", "max_tokens": 3}).json()
    ids = TOKENIZER.encode("hello world", add_special_tokens=True).tolist()
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "text": TOKENIZER.decode((ids * 3)[:3]),
            "finish_reason": "length",
            "logprobs": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": len(ids),
        "completion_tokens": 3,
        "total_tokens": len(ids) + 3,
        "prompt_tokens_details": {"cached_tokens": len(ids) - 1},
    }


def test_completion_defaults_to_sixteen_tokens(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json={"prompt": "hello"}).json()
    assert answer["usage"]["completion_tokens"] == 16


def test_chat_defaults_to_the_whole_context(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hello"}]
    usage = client.post("/v1/chat/completions", json={"messages": messages}).json()["usage"]
    assert usage["total_tokens"] == 512


@pytest.mark.parametrize("prompt", ["é 🙂 日本 hello", "x", [200, 201, 150, 151, 230, 10]])
def test_streamed_text_equals_the_whole_text(client: httpx.Client, prompt: Any) -> None:
    body = {"prompt": prompt, "max_tokens": 40}
    whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    parts = [event["choices"][0]["text"] for event in events(client, "/v1/completions", body)]
    assert "".join(parts) == whole
    assert len(parts) > 5


def test_no_event_splits_a_character(client: httpx.Client) -> None:
    parts = events(client, "/v1/completions", {"prompt": "🙂日é", "max_tokens": 30})
    ids = TOKENIZER.encode("🙂日é", add_special_tokens=True)
    assert len(ids) > 3
    assert not any("�" in event["choices"][0]["text"] for event in parts[:-1])


def test_stream_ends_with_the_usage_on_request(client: httpx.Client) -> None:
    body = {"prompt": "hello", "max_tokens": 4, "stream_options": {"include_usage": True}}
    *others, last = events(client, "/v1/completions", body)
    assert all(event["usage"] is None for event in others)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4


def test_every_kind_of_prompt_is_accepted(client: httpx.Client) -> None:
    for prompt, expected in ((["a", "b"], 2), ([[5, 6], [7]], 2), ([5, 6, 7], 1), ("a", 1)):
        answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2}).json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(expected)), answer


def test_n_sequences_stream_with_their_indices(client: httpx.Client) -> None:
    body = {"prompt": ["hello world", "how are you"], "n": 3, "max_tokens": 5}
    whole = client.post("/v1/completions", json=body).json()
    texts = dict.fromkeys(range(6), "")
    for event in events(client, "/v1/completions", body):
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert whole["usage"]["completion_tokens"] == 30


def test_stop_string_cuts_the_text_and_aborts(server: Running, client: httpx.Client) -> None:
    body = {"prompt": "hello world", "max_tokens": 400, "stop": ["o wor", "zzz"]}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hell", "stop")
    server.wait_for("abort")
    parts = events(client, "/v1/completions", body)
    assert "".join(event["choices"][0]["text"] for event in parts) == "hell"
    kept = client.post("/v1/completions", json={**body, "include_stop_str_in_output": True}).json()
    assert kept["choices"][0]["text"] == "hello wor"
    ids = TOKENIZER.encode("hello wor", add_special_tokens=False)
    assert kept["usage"]["completion_tokens"] <= len(ids)


def test_eos_token_stops_without_text(client: httpx.Client) -> None:
    body = {"prompt": [70, 71, 0], "max_tokens": 9}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert (choice["finish_reason"], choice["text"]) == ("stop", TOKENIZER.decode([70, 71]))
    ignoring = client.post("/v1/completions", json={**body, "ignore_eos": True}).json()
    assert ignoring["choices"][0]["finish_reason"] == "length"


def test_completion_logprobs_match_the_text(client: httpx.Client) -> None:
    body = {"prompt": "hello world é", "max_tokens": 20, "logprobs": 2}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    report = choice["logprobs"]
    assert (
        len(report["tokens"]) == len(report["token_logprobs"]) == len(report["text_offset"]) == 20
    )
    for token, offset in zip(report["tokens"], report["text_offset"], strict=True):
        assert "�" in token or choice["text"][offset:].startswith(token)
    assert all(2 <= len(top) <= 3 or "�" in "".join(top) for top in report["top_logprobs"])
    streamed = [
        event["choices"][0]["logprobs"] for event in events(client, "/v1/completions", body)
    ]
    assert [token for part in streamed if part for token in part["tokens"]] == report["tokens"]


def test_chat_logprobs_have_bytes(client: httpx.Client) -> None:
    body = {
        "messages": [{"role": "user", "content": "é"}],
        "max_tokens": 9,
        "logprobs": True,
        "top_logprobs": 3,
    }
    choice = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert (
        bytes(b for entry in entries for b in entry["bytes"]).decode()
        == choice["message"]["content"]
    )
    assert all(len(entry["top_logprobs"]) == 3 for entry in entries)


def test_chat_is_rendered_with_roles_and_tools(client: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 5}'}}
    body: dict[str, Any] = {
        "messages": [
            {
                "role": "developer",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "user", "content": "q"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [call],
                "refusal": None,
                "annotations": [],
            },
            {"role": "tool", "tool_call_id": "1", "content": "r"},
        ],
        "tools": [tool],
        "chat_template_kwargs": {"shout": True},
        "max_tokens": 200,
    }
    text = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert text.startswith(
        "system: a\nbuser: qassistant: None5tool: r" + json.dumps([tool]) + "assistant:!"
    )
    without = client.post("/v1/chat/completions", json={**body, "tool_choice": "none"}).json()
    assert '"function"' not in without["choices"][0]["message"]["content"]


def test_the_openai_client_works_unmodified(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == ["fake"]
    assert sdk.models.retrieve("fake").id == "fake"
    chat = sdk.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "hi"}],
        max_completion_tokens=4,
        seed=3,
        temperature=0,
        logit_bias={"5": -100},
        frequency_penalty=1,
        stop="zz",
        user="me",
    )
    assert chat.choices[0].message.role == "assistant"
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 4
    stream = sdk.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"top_k": 5, "min_p": 0.1},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == chat.choices[0].message.content
    messages: Any = [{"role": "user", "content": "hi"}]
    with sdk.chat.completions.stream(model="fake", messages=messages, stop="assistant") as helper:
        assert helper.get_final_completion().choices[0].message.content == "user: hi"
    completion = sdk.completions.create(model="fake", prompt=[5, 6, 7], max_tokens=3)
    assert completion.choices[0].finish_reason == "length"
    with pytest.raises(openai.NotFoundError, match="available: 'fake'"):
        sdk.completions.create(model="other", prompt="a")


def test_information_routes_return_200(client: httpx.Client) -> None:
    assert client.get("/v1/plugins").json() == {"model": "fake", "plan": []}
    assert client.get("/version").json()["version"]
    assert client.get("/openapi.json").json()["paths"].keys() >= {
        "/v1/completions",
        "/v1/chat/completions",
    }


def test_finished_requests_are_logged(server: Running, client: httpx.Client) -> None:
    body = {"prompt": [70, 71, 72], "max_tokens": 3}
    whole = client.post("/v1/completions", json=body).json()["id"]
    streamed = events(client, "/v1/completions", body)[0]["id"]
    for each in (whole, streamed):
        line = f"{each}: length; 3 prompt tokens (2 cached), 3 output tokens"
        wait_until(lambda line=line: line in server.said(), 60, line)


def test_stream_interval_groups_tokens(tmp_path_factory: pytest.TempPathFactory) -> None:
    options = {"stream_interval": 4, "reports_cached_tokens": False}
    with (
        running(tmp_path_factory.mktemp("interval"), options=options) as server,
        server.client() as client,
    ):
        parts = events(client, "/v1/completions", {"prompt": [70, 71, 72], "max_tokens": 10})
        lengths = [len(event["choices"][0]["text"]) for event in parts]
        assert lengths == [1, 4, 4, 1]
        answer = client.post("/v1/completions", json={"prompt": [70]}).json()
        assert "prompt_tokens_details" not in answer["usage"]


def test_server_without_tokenizer_takes_and_returns_ids(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with (
        running(tmp_path_factory.mktemp("ids"), has_tokenizer=False) as server,
        server.client() as client,
    ):
        body = {"prompt": [5, 6, 7], "max_tokens": 4}
        choice = client.post("/v1/completions", json=body).json()["choices"][0]
        assert (choice["token_ids"], choice["text"]) == ([5, 6, 7, 5], "")
        parts = events(client, "/v1/completions", body)
        assert [i for event in parts for i in event["choices"][0]["token_ids"]] == [5, 6, 7, 5]
        for change, param in (({"prompt": "text"}, "prompt"), ({"stop": "text"}, "stop")):
            refused = client.post("/v1/completions", json={**body, **change})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        messages = {"messages": [{"role": "user", "content": "hi"}]}
        assert client.post("/v1/chat/completions", json=messages).status_code == 400


def test_echo_begins_the_text_and_the_logprobs(client: httpx.Client) -> None:
    prompt = "hello world é, how are you"
    body = {"prompt": prompt, "max_tokens": 3, "echo": True, "logprobs": 2}
    answer = client.post("/v1/completions", json=body).json()
    (choice,), report = answer["choices"], answer["choices"][0]["logprobs"]
    num_prompt = answer["usage"]["prompt_tokens"]
    assert choice["text"].startswith(prompt)
    assert {len(column) for column in report.values()} == {num_prompt + 3}
    assert report["token_logprobs"][0] is None
    assert report["top_logprobs"][0] is None
    assert report["token_logprobs"][1:num_prompt] == [-float(at) for at in range(1, num_prompt)]
    assert all(len(top) in (1, 2, 3) for top in report["top_logprobs"][1:])
    for token, offset in zip(report["tokens"], report["text_offset"], strict=True):
        assert "�" in token or choice["text"][offset:].startswith(token)
    assert "".join(report["tokens"]).count("�") == 2  # the two bytes of one character


def test_echo_without_output_scores_the_prompt(sdk: openai.OpenAI) -> None:
    made = sdk.completions.create(
        model="fake", prompt=[[70, 71, 72], [80]], max_tokens=0, echo=True, logprobs=0
    )
    assert made.usage is not None
    assert made.usage.completion_tokens == 0
    for choice, ids in zip(made.choices, ([70, 71, 72], [80]), strict=True):
        assert choice.text == TOKENIZER.decode(ids)
        assert choice.finish_reason == "length"
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == [None, -1.0, -2.0][: len(ids)]
        assert choice.logprobs.tokens == [TOKENIZER.decode([each]) for each in ids]


def test_echo_is_streamed_before_the_first_token(client: httpx.Client) -> None:
    body = {"prompt": "hello world", "max_tokens": 4, "echo": True, "n": 2}
    whole = client.post("/v1/completions", json=body).json()["choices"]
    streamed = [event["choices"][0] for event in events(client, "/v1/completions", body)]
    for choice in whole:
        texts = [part["text"] for part in streamed if part["index"] == choice["index"]]
        assert texts[0].startswith("hello world")
        assert "".join(texts) == choice["text"]


def test_prompt_logprobs_have_vllms_shape(client: httpx.Client) -> None:
    body = {"prompt": [70, 71, 72], "max_tokens": 1, "prompt_logprobs": 1}
    (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    first, second, third = choice["prompt_logprobs"]
    assert (first, choice["logprobs"]) == (None, None)
    text = TOKENIZER.decode([72])
    assert third["72"] == {"logprob": -2.0, "rank": 2, "decoded_token": text}
    assert {each["rank"] for each in second.values()} == {1, 2}
    chat = {"messages": [{"role": "user", "content": "hello"}], "prompt_logprobs": 0}
    answer = client.post("/v1/chat/completions", json={**chat, "max_tokens": 1}).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, "echo"),
        ("completions", {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("chat/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("chat/completions", {"max_tokens": 0}, "max_tokens"),
        ("completions", {"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_wrong_scoring_request_names_the_field(
    client: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    messages = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {}
    response = client.post(f"/v1/{path}", json={**messages, **body})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_disabled_metrics_return_404(client: httpx.Client) -> None:
    assert client.get("/metrics").status_code == 404
    assert client.get("/v1/stats").status_code == 200
