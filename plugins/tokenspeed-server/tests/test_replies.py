"""Replies: their text, deltas, log-probabilities, usage and errors."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import PARSERS
from server_support import make_tokenizer
from tokenspeed_server.errors import ApiError
from tokenspeed_server.formats import ChatFormat, CompletionFormat, Usage
from tokenspeed_server.parser_chain import Delta, ParserChain, message
from tokenspeed_server.replies import Choice, Reply, ReplyOptions

from tokenspeed_core.api.parsers import ParserContext, ReplyEvent, ReplyParser
from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.engine.messages import TokenLogprobs
from tokenspeed_core.errors import PluginError
from tokenspeed_core.text.assembler import Assembler

TOKENIZER = make_tokenizer()
Kind = Literal["content", "reasoning", "call", "arguments"]


class Shouts:
    """A parser: an "o" starts reasoning, an "h" a call with arguments, an "a" ends either."""

    def __init__(self) -> None:
        self.kind: Kind = "content"

    def feed(self, text: str) -> list[ReplyEvent]:
        found = []
        for letter in text:
            if letter in "oh":
                self.kind = "reasoning" if letter == "o" else "arguments"
            elif letter == "a":
                self.kind = "content"
            found += [ReplyEvent("call", "f")] if letter == "h" else [ReplyEvent(self.kind, letter)]
        return found

    def finish(self) -> list[ReplyEvent]:
        return [ReplyEvent("content", ".")]


class WritesIds(Shouts):
    """A parser of calls with the ids that the text contains."""

    def feed(self, text: str) -> list[ReplyEvent]:
        return [ReplyEvent("call", "f", letter) for letter in text]


class Capitals(Shouts):
    """A parser that changes the content."""

    def feed(self, text: str) -> list[ReplyEvent]:
        return [ReplyEvent("content", text.upper())]


def make(
    options: ReplyOptions,
    stops: list[str],
    kind: Any = CompletionFormat,
    parsers: Sequence[ReplyParser] = (),
) -> tuple[Reply, Choice]:
    reply = Reply(kind("m", TOKENIZER, False), options, Usage(3, 0, 0))
    assembler = Assembler(TOKENIZER.detokenizer(), stops)
    reader = ParserChain({type(each).__name__: each for each in parsers})
    return reply, reply.add_choice(assembler, reader, is_first_of_prompt=True)


def feed(choice: Choice, ids: list[int], cuts: list[int], num_logprobs: int = -1) -> None:
    """Hand out tokens in groups until either side ends the sequence."""
    for start, end in itertools.pairwise([0, *cuts, len(ids)]):
        num = end - start
        columns = TokenLogprobs(
            [-0.5] * num,
            [1] * num,
            [[(i, value) for value in (-0.5, -1.0, float("-inf"))] for i in ids[start:end]],
        )
        finish = FinishReason.LENGTH if end == len(ids) else FinishReason.NOT
        if choice.take(ids[start:end], finish, 0, columns if num_logprobs >= 0 else None):
            return


def events(reply: Reply) -> list[dict[str, Any]]:
    data = asyncio.run(reply.wait()).decode()
    return [json.loads(line.removeprefix("data: ")) for line in data.split("\n\n") if line]


tokens = st.lists(st.integers(1, 388), min_size=1, max_size=16)


@settings(max_examples=300, deadline=None)
@given(
    ids=tokens,
    stops=st.lists(st.sampled_from(["o", "he", "ll", "w", "a", " ", "é"]), max_size=3),
    interval=st.integers(1, 5),
    width=st.integers(-1, 2),
    data=st.data(),
)
def test_reply_does_not_depend_on_token_grouping(
    ids: list[int], stops: list[str], interval: int, width: int, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids) - 1), max_size=5)))
    whole, choice = make(ReplyOptions(False, 1, width), stops)
    feed(choice, ids, list(range(1, len(ids))), width)
    answer = whole.answers[0]
    streamed, choice = make(ReplyOptions(True, interval, width), stops)
    feed(choice, ids, cuts, width)
    parts = [event["choices"][0] for event in events(streamed)]
    assert "".join(part["text"] for part in parts) == answer.text
    assert parts[-1]["finish_reason"] == answer.finish_reason
    assert streamed.usage == whole.usage
    if width >= 0:
        report = json.loads(whole.format.body(whole.answers, whole.usage, True, False))["choices"][
            0
        ]["logprobs"]
        for name, values in report.items():
            reported = [
                value for part in parts if part["logprobs"] for value in part["logprobs"][name]
            ]
            assert reported == values
        assert len(report["tokens"]) == whole.usage.num_output


def test_call_ids_of_the_model_are_kept_and_unique() -> None:
    chain = ParserChain({"ids": WritesIds()})
    whole = message(chain.read("aba", is_over=False))
    first, second, repeated = [call["id"] for call in whole["tool_calls"]]
    assert (first, second) == ("a", "b")
    assert repeated.startswith("call_")


def test_call_in_an_unclosed_thought_is_a_call() -> None:
    reasoning, tools = PARSERS
    assert reasoning is not None
    assert tools is not None
    function = {"type": "function", "function": {"name": "f"}}
    context = ParserContext((function,), "<think>\n")
    chain = ParserChain({"thought": reasoning.make(context), "calls": tools.make(context)})
    deltas: list[Delta] = []
    for letter in 'I ask.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>':
        deltas += chain.read(letter, is_over=False)
    deltas += chain.read("", is_over=True)
    answer = message(deltas)
    assert (answer["reasoning_content"], answer["content"]) == ("I ask.", None)
    assert answer["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert chain.has_called


@settings(max_examples=200, deadline=None)
@given(ids=tokens, interval=st.integers(1, 5), width=st.integers(-1, 2), data=st.data())
def test_streamed_deltas_add_up_to_the_message(
    ids: list[int], interval: int, width: int, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids) - 1), max_size=5)))
    whole, choice = make(ReplyOptions(False, 1, width), [], ChatFormat, [Shouts(), Capitals()])
    feed(choice, ids, [], width)
    (body,) = json.loads(whole.format.body(whole.answers, whole.usage, width >= 0, False))[
        "choices"
    ]
    streamed, choice = make(
        ReplyOptions(True, interval, width), [], ChatFormat, [Shouts(), Capitals()]
    )
    feed(choice, ids, cuts, width)
    parts = [event["choices"][0] for event in events(streamed)]
    deltas = [part["delta"] for part in parts]
    calls: list[dict[str, Any]] = []
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        if "id" in call:
            assert (call["index"], call["type"]) == (len(calls), "function")
            calls.append({"name": call["function"]["name"], "arguments": ""})
        calls[call["index"]]["arguments"] += call["function"]["arguments"]
    message = body["message"]
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message.get(
        "reasoning_content", ""
    )
    assert calls == [call["function"] for call in message.get("tool_calls", ())]
    assert all(call.keys() == {"id", "type", "function"} for call in message.get("tool_calls", ()))
    assert parts[-1]["finish_reason"] == body["finish_reason"] == "length"
    reported = [
        entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]
    ]
    assert reported == (body["logprobs"]["content"] if width >= 0 else [])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('eh{"x": 1}', "tool_calls"),
        ('h{"x": 1}ah{}', "tool_calls"),
        ('h{"x": 1}a ;', "tool_calls"),
        ("you", "stop"),
        ('h{"x": 1;', "stop"),
        ("h;", "stop"),
        ('h{"x": 1}ah{"y"', "stop"),
    ],
)
def test_finish_reason_is_tool_calls_if_calls_are_complete(text: str, reason: str) -> None:
    reply, choice = make(ReplyOptions(True), [";"], ChatFormat, [Shouts()])
    ids = TOKENIZER.encode(text, add_special_tokens=False).tolist()
    choice.take([*ids, 0], FinishReason.STOP, 0, None)
    parts = [event["choices"][0] for event in events(reply)]
    assert parts[-1]["finish_reason"] == reply.answers[0].finish_reason == reason
    calls = [call for part in parts for call in part["delta"].get("tool_calls", ())]
    assert sum("id" in call for call in calls) == text.count("h")


def test_message_with_only_a_call_has_no_content() -> None:
    reader = ParserChain({"shouts": Shouts()})
    deltas = reader.read("h12", is_over=False)
    assert message(deltas)["content"] is None
    assert message(deltas) == message(deltas), "deltas must not change"
    assert message([])["content"] == ""


class Breaks(Shouts):
    """A parser that raises or returns a given value."""

    def __init__(self, gives: Any) -> None:
        self.gives = gives

    def feed(self, text: str) -> Any:
        if isinstance(self.gives, BaseException):
            raise self.gives
        return self.gives


class BreaksAtTheEnd(Shouts):
    """A parser that fails when the reply is over."""

    def finish(self) -> Any:
        raise SystemExit(5)


@pytest.mark.parametrize(
    ("gives", "said"),
    [
        (RuntimeError("no idea"), "RuntimeError: no idea"),
        (SystemExit(5), "SystemExit: 5"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (asyncio.CancelledError(), "CancelledError"),
        (None, "'NoneType' object is not iterable"),
        (["text"], "'str' object has no attribute 'kind'"),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_failing_parser_is_named(gives: Any, said: str, is_first: bool) -> None:
    both = {"the bad one of acme 1.0": Breaks(gives), "the good one of other 2.0": Shouts()}
    reader = ParserChain(both if is_first else dict(reversed(both.items())))
    with pytest.raises(PluginError, match=r"^the bad one of acme 1.0 fails on a reply: ") as caught:
        reader.read("x", is_over=False)
    assert said in str(caught.value)
    assert "other" not in str(caught.value)


def test_parser_that_fails_at_the_end_is_named() -> None:
    with pytest.raises(PluginError, match=r"^acme fails on a reply: SystemExit: 5"):
        ParserChain({"acme": BreaksAtTheEnd()}).read("", is_over=True)


def test_interval_groups_tokens_after_the_first() -> None:
    reply, choice = make(ReplyOptions(True, 3), [])
    feed(choice, [70] * 8, list(range(1, 8)))
    assert [len(event["choices"][0]["text"]) for event in events(reply)] == [1, 3, 3, 1]


def test_minus_infinity_is_a_json_number() -> None:
    reply, choice = make(ReplyOptions(False, 1, 3), [], ChatFormat)
    feed(choice, [70], [], 3)
    body = reply.format.body(reply.answers, reply.usage, True, False)
    top = json.loads(body)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert top[2]["logprob"] == -9999.0


@pytest.mark.parametrize(
    ("finish", "status"), [(FinishReason.ERROR, 500), (FinishReason.ABORT, 503)]
)
def test_aborted_sequence_fails_the_request(finish: FinishReason, status: int) -> None:
    reply, choice = make(ReplyOptions(True), [])
    assert choice.take([], finish, 0, None)
    assert reply.error is not None
    assert reply.error.status == status
    assert reply.first_token_at is None


def test_first_token_time_is_recorded_once() -> None:
    reply, choice = make(ReplyOptions(True), [])
    choice.take([], FinishReason.NOT, 0, None)
    assert reply.first_token_at is None
    choice.take([1], FinishReason.NOT, 0, None)
    first = reply.first_token_at
    assert first is not None
    choice.take([2], FinishReason.NOT, 0, None)
    assert reply.first_token_at == first


def test_sequence_with_logprobs_may_end_without_a_token() -> None:
    reply, choice = make(ReplyOptions(False, 1, 0), [])
    assert not choice.take([70], FinishReason.NOT, 0, TokenLogprobs([-0.5], [1], [[]]))
    assert choice.take([], FinishReason.LENGTH, 0, TokenLogprobs([], [], []))
    assert reply.answers[0].finish_reason == "length"
    assert len(reply.answers[0].logprobs) == 1


def test_first_error_ends_the_wait() -> None:
    reply, _ = make(ReplyOptions(True), [])

    async def wait() -> bytes:
        asyncio.get_running_loop().call_later(0.01, reply.fail, ApiError(429, "full"))
        return await asyncio.wait_for(reply.wait(), 2)

    assert asyncio.run(wait()) == b""
    reply.fail(ApiError(500, "later"))
    assert reply.error is not None
    assert reply.error.status == 429


@pytest.mark.parametrize("finish", [FinishReason.NOT, FinishReason.ERROR])
def test_usage_counts_tokens_of_failed_sequences(finish: FinishReason) -> None:
    reply, choice = make(ReplyOptions(True), [])
    choice.take([1, 2], FinishReason.NOT, 0, None)
    choice.take([3], finish, 0, None)
    assert reply.usage.num_output == 3
