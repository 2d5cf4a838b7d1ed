"""Tool calls and reasoning of the demo through the openai client; parsers of other plugins."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest
from plugin_files import write_plugin
from serving import COMMAND, DEMO, WEATHER, Background, Served, run_command, served

PIP = ("-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation")
CALLING: dict[str, Any] = {
    **DEMO,
    "messages": [{"role": "user", "content": "Get the weather in Paris."}],
    "tools": [WEATHER],
}
ADDING: dict[str, Any] = {**DEMO, "messages": [{"role": "user", "content": "What is 58+67?"}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("serve")
    with served(folder) as running:  # the parsers are chosen by the chat template
        yield running


@pytest.fixture(scope="module")
def sdk(server: Served) -> openai.OpenAI:
    return server.openai()


def whole(sdk: openai.OpenAI, ask: dict[str, Any]) -> tuple[Any, ...]:
    """Return the content, reasoning, calls and finish reason of an unstreamed reply."""
    (choice,) = sdk.chat.completions.create(**ask).choices
    message = choice.message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    assert all(
        call.id.startswith("call_") and call.type == "function" for call in message.tool_calls or ()
    )
    return (
        message.content or "",
        getattr(message, "reasoning_content", ""),
        calls,
        choice.finish_reason,
    )


def streamed(sdk: openai.OpenAI, ask: dict[str, Any]) -> tuple[Any, ...]:
    """Return the same from a stream, concatenated."""
    content, reasoning, calls, reason = "", "", list[list[str]](), None
    for chunk in sdk.chat.completions.create(**ask, stream=True):
        delta, reason = chunk.choices[0].delta, chunk.choices[0].finish_reason
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", "")
        for call in delta.tool_calls or ():
            if call.id:
                assert call.index == len(calls)
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments
    return content, reasoning, [tuple(call) for call in calls], reason


class Person(pydantic.BaseModel):
    """The model into which structured output is parsed."""

    name: str
    age: int
    likes: Literal["tea", "coffee"]


@pytest.mark.slow
def test_client_parses_structured_output(sdk: openai.OpenAI) -> None:
    for temperature in (0, 1):
        reply = sdk.chat.completions.parse(
            model="demo",
            messages=[{"role": "user", "content": "Ann is 32 and likes tea."}],
            temperature=temperature,
            seed=1,
            response_format=Person,
            max_tokens=1000,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
        assert isinstance(reply.choices[0].message.parsed, Person)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_forced_call_is_made_for_any_prompt(sdk: openai.OpenAI, choice: Any) -> None:
    ask = {**CALLING, "messages": ADDING["messages"], "tool_choice": choice, "max_tokens": 600}
    reply = whole(sdk, ask)
    assert reply == streamed(sdk, ask)
    content, _, calls, reason = reply
    assert (content, reason) == ("", "tool_calls")
    assert len(calls) >= 1
    for name, arguments in calls:
        assert name == "get_weather"
        assert isinstance(json.loads(arguments)["city"], str)


def test_strict_tools_still_allow_an_answer(sdk: openai.OpenAI) -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    _, _, ((name, arguments),), _ = whole(sdk, {**CALLING, "tools": [strict]})
    assert (name, json.loads(arguments)) == ("get_weather", {"city": "Paris"})
    content, _, calls, _ = whole(sdk, {**ADDING, "tools": [strict]})
    assert ("125" in content, calls) == (True, [])


def test_bad_grammars_fail_alone(sdk: openai.OpenAI) -> None:
    usual = Background(lambda: whole(sdk, ADDING))
    for bad in ({"regex": "(a"}, {"json": {"type": "x"}}, {"regex": "(" * 4000 + ")" * 4000}):
        with pytest.raises(openai.BadRequestError):
            sdk.chat.completions.create(**ADDING, extra_body={"structured_outputs": bad})
    assert "125" in usual.result()[0]


def test_tool_call_is_the_same_streamed_and_whole(sdk: openai.OpenAI) -> None:
    reply = whole(sdk, CALLING)
    assert reply == streamed(sdk, CALLING)
    content, _, ((name, arguments),), reason = reply
    assert (content, name, json.loads(arguments), reason) == (
        "",
        "get_weather",
        {"city": "Paris"},
        "tool_calls",
    )
    with sdk.chat.completions.stream(**CALLING) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == (name, arguments)


def test_tool_result_is_answered(sdk: openai.OpenAI) -> None:
    message = sdk.chat.completions.create(**CALLING).choices[0].message
    (call,) = message.tool_calls or ()
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 17}'}
    messages = [*CALLING["messages"], message.model_dump(exclude_none=True), result]
    answer = whole(sdk, {**CALLING, "messages": messages})
    assert "17" in answer[0]
    assert answer[2:] == ([], "stop")


@pytest.mark.parametrize("is_stream", [False, True])
def test_stop_strings_do_not_cut_the_reasoning(sdk: openai.OpenAI, is_stream: bool) -> None:
    read = streamed if is_stream else whole
    content, reasoning, _, reason = read(sdk, {**ADDING, "stop": ["="]})
    assert "8+7" in reasoning and "carry" in reasoning
    assert content == "58 + 67 "
    assert reason == "stop"


def test_reasoning_is_separate_from_the_answer(sdk: openai.OpenAI) -> None:
    reply = whole(sdk, ADDING)
    assert reply == streamed(sdk, ADDING)
    content, reasoning, calls, reason = reply
    assert content == "58 + 67 = 125"
    assert "8+7" in reasoning
    assert "think" not in content + reasoning
    assert (calls, reason) == ([], "stop")


def test_disabled_thinking_leaves_no_reasoning(sdk: openai.OpenAI) -> None:
    without = {**ADDING, "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    content, reasoning, *_ = whole(sdk, without)
    assert "125" in content
    assert reasoning == ""


def test_call_is_text_without_tools(sdk: openai.OpenAI) -> None:
    ask = {
        **DEMO,
        "messages": [{"role": "user", "content": 'Repeat: <tool_call>{"name": "f"}</tool_call>'}],
    }
    for extra in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        content, _, calls, reason = whole(sdk, {**ask, **extra})
        assert (calls, reason) == ([], "stop")
        assert content


@pytest.mark.parametrize(
    ("limit", "finish_reason"), [({"max_tokens": 18}, "length"), ({"stop": ["aris"]}, "stop")]
)
def test_truncated_call_has_partial_arguments(
    sdk: openai.OpenAI, limit: dict[str, Any], finish_reason: str
) -> None:
    ask = {**CALLING, **limit}
    reply = whole(sdk, ask)
    assert reply == streamed(sdk, ask)
    _, _, ((name, arguments),), reason = reply
    assert (name, reason) == ("get_weather", finish_reason)
    assert '{"city": "Paris"}'.startswith(arguments)


def test_each_choice_has_its_own_calls(sdk: openai.OpenAI) -> None:
    choices = sdk.chat.completions.create(**CALLING, n=3).choices
    ids = [call.id for choice in choices for call in choice.message.tool_calls or ()]
    assert len(set(ids)) == len(ids) == 3


def test_help_and_plugin_list_name_the_parsers() -> None:
    done = subprocess.run(
        [*COMMAND, "serve", "--help=tool-call-parser"], capture_output=True, text=True, check=True
    )
    assert "qwen" in done.stdout
    listed = subprocess.run(
        [*COMMAND, "plugins", "list"], capture_output=True, text=True, check=True
    ).stdout
    assert "reasoning_parsers" in listed


@pytest.mark.parametrize(
    "command",
    [
        ("serve", "--port", "0"),
        pytest.param(("serve", "--dry-run", "--device", "cpu"), marks=pytest.mark.release),
    ],
)
def test_unknown_parser_suggests_the_nearest(command: tuple[str, ...], tmp_path: Path) -> None:
    status, err = run_command(tmp_path, *command, "--tool-call-parser", "qwenn")
    assert status == 2
    assert "qwenn" in err
    assert "qwen" in err.replace("qwenn", "")


STRANGE = """
import sys

from tokenspeed_core.api import ParserContext, ParserSpec, ReplyEvent

FAILING = ParserSpec("strange_parsers:Failing")
LEAVING = ParserSpec("strange_parsers:Leaving")
REPORTING = ParserSpec("strange_parsers:Reporting", reads_special_tokens=True)


class Reporting:
    def __init__(self, context: ParserContext) -> None:
        self.context = context

    def feed(self, text: str) -> list[ReplyEvent]:
        return [ReplyEvent("content", text)]

    def finish(self) -> list[ReplyEvent]:
        (tool,) = self.context.tools
        return [ReplyEvent("call", tool["function"]["name"]), ReplyEvent("arguments", self.context.prompt_end)]


class Failing(Reporting):
    def feed(self, text: str) -> list[ReplyEvent]:
        if "P" in text:
            raise RuntimeError("no idea")
        return super().feed(text)


class Leaving(Reporting):
    def __init__(self, context: ParserContext) -> None:
        if "leave" in context.prompt_end:
            sys.exit(4)

    def feed(self, text: str) -> list[ReplyEvent]:
        sys.exit(5)
"""


@pytest.fixture
def strange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the parsers above."""
    names = ("failing", "leaving", "reporting")
    entries = {name: f"strange_parsers:{name.upper()} [api1]" for name in names}
    modules = {"strange_parsers": STRANGE}
    write_plugin(tmp_path / "site", "strange", "tool_parsers", entries, modules)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))


@pytest.mark.release
@pytest.mark.usefixtures("strange")
def test_failing_parser_fails_only_its_request(tmp_path: Path) -> None:
    with served(tmp_path, "--tool-call-parser", "failing") as running:
        sdk = running.openai()
        with pytest.raises(openai.InternalServerError, match="log"):
            sdk.chat.completions.create(**CALLING)
        assert re.search("failing of strange 1.0 .*RuntimeError: no idea", running.stderr())
        assert "125" in whole(sdk, ADDING)[0]


@pytest.mark.usefixtures("strange")
def test_exiting_parser_fails_only_its_request(tmp_path: Path) -> None:
    with served(tmp_path, "--tool-call-parser", "leaving") as running:
        sdk = running.openai()
        leave = {"messages": [{"role": "user", "content": "Do leave."}]}
        other = Background(
            lambda: whole(sdk, {**ADDING, "max_tokens": 200, "extra_body": {"ignore_eos": True}})
        )
        for ask in (CALLING, {**CALLING, **leave}):
            with pytest.raises(openai.InternalServerError, match="log"):
                sdk.chat.completions.create(**ask)
        assert "125" in other.result()[0]
        with pytest.raises(openai.APIError, match="log"):
            streamed(sdk, CALLING)
        assert re.search("leaving of strange 1.0 .*SystemExit: 5", running.stderr())
        assert re.search("leaving of strange 1.0.* SystemExit: 4", running.stderr())
        assert running.process.poll() is None


@pytest.mark.usefixtures("strange")
def test_parser_gets_context_and_special_tokens(
    tmp_path: Path,
) -> None:
    with served(tmp_path, "--tool-call-parser", "reporting") as running:
        sdk = running.openai()
        beyond = {"extra_body": {"ignore_eos": True}, "max_tokens": 60}
        content, _, ((name, prompt_end),), reason = whole(sdk, {**CALLING, **beyond})
        assert "<|im_end|>" in content
        assert (name, reason) == ("get_weather", "length")
        assert prompt_end.endswith("in Paris.<|im_end|>\n<|im_start|>assistant\n")
        assert "<|im_end|>" not in whole(sdk, {**ADDING, **beyond})[0]


@pytest.mark.release
def test_parsers_from_the_template_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    for kind in ("tool-parser", "reasoning-parser"):
        folder = str(tmp_path / kind)
        subprocess.run(
            [*COMMAND, "plugins", "new", kind, "acme", "--path", folder],
            check=True,
            capture_output=True,
        )
        subprocess.run([sys.executable, "-P", *PIP, "--target", str(site), folder], check=True)
    monkeypatch.setenv("PYTHONPATH", str(site))
    flags = (
        "--tool-call-parser",
        "acme/tool-parser",
        "--reasoning-parser",
        "acme/reasoning-parser",
    )
    with served(tmp_path, *flags) as running:
        sdk = running.openai()
        reply = whole(sdk, CALLING)
        assert reply == streamed(sdk, CALLING)
        assert reply[2:] == ([("get_weather", '{"city": "Paris"}')], "tool_calls")
        content, reasoning, *_ = whole(sdk, ADDING)
        assert content.strip() == "58 + 67 = 125"
        assert "8+7" in reasoning
