"""Unknown fields are ignored and named, typos are refused, and messages of the server are taken back."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_support import make_tokenizer
from tokenspeed_server.api_body import parse_body
from tokenspeed_server.prompts import chat_ids, known_parts
from tokenspeed_server.protocol import ChatRequest, CompletionRequest
from tokenspeed_server.unknown_fields import IgnoredFieldsLog, Policy, header

from tokenspeed_core.commands.serving import BadRequestError, InputProcessor, ModelText, Ready
from tokenspeed_core.text import ChatTemplate

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
LIMITS = Ready(4096, 4096, 400, "")


def chat(*messages: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps(
        {"messages": messages or [{"role": "user", "content": "hi"}], **fields}
    ).encode()


def user(**fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": "hi", **fields}


def text_of(template: str, body: bytes) -> str:
    """Return the prompt of a chat."""
    tokenizer = make_tokenizer()
    parsed = parse_body(body, ChatRequest)
    tools = known_parts(parsed.raw.get("tools") or ()) or None
    text = ModelText(tokenizer, ChatTemplate(template, {}))
    ids = chat_ids(InputProcessor(text, LIMITS), parsed.body, tools)
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("body", "ignored"),
    [
        (chat(top_a=0.5, provider={"order": ["x"]}), ["top_a", "provider"]),
        (chat(user(provider_specific_fields={}), user(provider_specific_fields={})),
         ["messages[].provider_specific_fields"]),
        (chat(user(id="msg_1", cache_control={"type": "ephemeral"})),
         ["messages[].id", "messages[].cache_control"]),
        (chat({"role": "user", "content": [
            {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}),
         ["messages[].content[].cache_control"]),
        (chat({"role": "assistant", "content": None, "tool_calls": [
            {**CALL, "extra_content": {"google": {}}}]}),
         ["messages[].tool_calls[].extra_content"]),
        (chat(tools=[{**TOOL, "cache_control": {}}]), ["tools[].cache_control"]),
        (chat(tools=[{"type": "function", "function": {"name": "f", "returns": {}}}]),
         ["tools[].function.returns"]),
        (chat(stream=True, stream_options={"include_all": True}), ["stream_options.include_all"]),
        (chat(store=True), ["store"]),
        (chat(service_tier="flex"), ["service_tier"]),
        (chat(stream=True, stream_options={"include_obfuscation": True}),
         ["stream_options.include_obfuscation"]),
        (chat(store=False, service_tier="auto", metadata={"a": "b"}, user="u"), []),
        (chat(tools=[{"type": "function", "function": {"name": "f", "strict": True}}]), []),
        (chat(user(nothing=None)), ["messages[].nothing"]),
        (chat(nothing=None), []),
    ],
)  # fmt: skip
def test_ignored_fields_are_named(body: bytes, ignored: list[str]) -> None:
    assert list(parse_body(body, ChatRequest).ignored) == ignored


@pytest.mark.parametrize(
    ("field", "suggestion"),
    [
        ("temprature", "temperature"),
        ("maxTokens", "max_tokens"),
        ("max_token", "max_tokens"),
        ("top-p", "top_p"),
        ("response_formt", "response_format"),
        ("stop_token_id", "stop_token_ids"),
    ],
)
def test_probable_typo_is_refused_with_suggestion(field: str, suggestion: str) -> None:
    policies: tuple[Policy, ...] = ("warn", "error")
    for policy in policies:
        with pytest.raises(BadRequestError) as caught:
            parse_body(chat(**{field: 1}), ChatRequest, policy)
        assert (caught.value.param, caught.value.code) == (field, "unknown_field")
        assert suggestion in caught.value.message
    assert parse_body(chat(**{field: 1}), ChatRequest, "ignore").ignored == ()


def test_nested_typo_names_its_place() -> None:
    with pytest.raises(BadRequestError) as caught:
        parse_body(chat(user(), {"role": "user", "contents": "x"}), ChatRequest)
    assert caught.value.param == "messages[1].contents"


@pytest.mark.parametrize(
    ("body", "param"),
    [(chat(provider=1), "provider"), (chat(user(), user(id="x")), "messages[1].id")],
)
def test_unknown_fields_can_be_errors(body: bytes, param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        parse_body(body, ChatRequest, "error")
    assert (caught.value.param, caught.value.code) == (param, "unknown_field")


def test_number_of_unknown_fields_is_bounded() -> None:
    many = {f"zq{number}": 1 for number in range(100)}
    for body in (chat(**many), chat(*(user(**{name: 1}) for name in many))):
        with pytest.raises(BadRequestError) as caught:
            parse_body(body, ChatRequest)
        assert caught.value.code == "unknown_field"
        assert parse_body(body, ChatRequest, "ignore").ignored == ()
    same = chat(*[user(id="x")] * 1000)
    assert parse_body(same, ChatRequest).ignored == ("messages[].id",)


def test_header_holds_any_name_safely() -> None:
    name, value = header(["a\r\nx: y", "é\u2028", "messages[].id", *map(str, range(100))])
    assert name == b"x-tokenspeed-ignored-fields"
    assert value.isascii()
    assert value.decode().isprintable()
    assert value.decode().split(", ")[2] == "messages[].id"
    assert len(value.split(b", ")) == 32
    long = parse_body(chat(**{"z" * 10_000: 1}), ChatRequest)
    assert len(long.ignored[0]) == 64


def test_ignored_fields_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    notes = IgnoredFieldsLog()
    with caplog.at_level(logging.WARNING, "tokenspeed.requests"):
        for names in (["provider"], ["provider"], ["provider", "route"], []):
            notes.note(names)
    assert len(caplog.records) == 2
    assert "'route'" in caplog.records[1].getMessage()
    assert "'provider'" not in caplog.records[1].getMessage()


def test_ignored_fields_do_not_reach_the_prompt() -> None:
    template = "{{ messages[0] | tojson }}{{ tools | tojson }}"
    function = {"strict": True, "name": "f", "parameters": {"b": 1, "a": 2}, "returns": {}}
    tool = {"cache_control": {}, "type": "function", "function": function}
    text = text_of(template, chat(user(id="x", cache_control={}), tools=[tool]))
    assert text == (
        '{"role": "user", "content": "hi"}'
        '[{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": 2}}}]'
    )


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ('{"x": 1, "y": "ab', '{"x": 1, "y": "ab"}'),
        ('{"x": [1, 2', '{"x": [1, 2]}'),
        ("", "{}"),
        ("[1]", '"[1]"'),
        ("not json", '"not json"'),
        ('{"x": "\\ud800"}', None),
    ],
)
def test_cut_arguments_of_earlier_calls_are_accepted(arguments: str, seen: str | None) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    template = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    text = text_of(template, chat(message))
    assert seen is None or text == seen


def test_fields_of_replayed_answers_are_accepted() -> None:
    answer = {
        "role": "assistant", "content": None, "refusal": "no", "annotations": [{"type": "url"}],
        "audio": None, "function_call": None, "tool_calls": None, "reasoning_content": None,
    }  # fmt: skip
    assert parse_body(chat(user(), answer), ChatRequest).ignored == ()
    assert text_of("{{ messages[1].content }}", chat(user(), answer)) == "no"


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert text_of("{{ messages[0].content }}", chat({"role": "user", "content": parts})) == "a\nb"


@pytest.mark.parametrize(
    ("template", "effort", "text"),
    [
        ("{{ reasoning_effort }}", "high", "high"),
        ("{{ enable_thinking is defined and not enable_thinking }}", "none", "True"),
        ("{{ thinking is defined }}", "low", "False"),
        ("{{ messages | length }}", "high", "1"),
    ],
)
def test_reasoning_effort_sets_variables_of_the_template(
    template: str, effort: str, text: str
) -> None:
    assert text_of(template, chat(reasoning_effort=effort)) == text


def test_every_field_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs/http.md").read_text(encoding="utf-8")
    for kind in (ChatRequest, CompletionRequest):
        fields = kind.model_fields.keys() | kind.unsupported.keys()
        assert {name for name in fields if f"`{name}`" not in page} == set()


def test_best_of_must_equal_n() -> None:
    body = b'{"prompt": "a", "n": 2, "best_of": %d}'
    parse_body(body % 2, CompletionRequest).body.sampling_params()
    with pytest.raises(BadRequestError) as caught:
        parse_body(body % 3, CompletionRequest).body.sampling_params()
    assert (caught.value.param, caught.value.code) == ("best_of", "unsupported")


@given(st.lists(st.text(max_size=9), max_size=5))
def test_header_of_any_names_is_valid(names: list[str]) -> None:
    h11.Response(status_code=200, headers=[header(names)])
