"""The format of answers: events of streams and whole bodies, for completions and for chats."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from tokenspeed_core.commands.serving import Tokenizer, current_request_id
from tokenspeed_server.errors import ApiError
from tokenspeed_server.logprobs import AnswerLogprobs, LogprobWriter, ScoredPrompt
from tokenspeed_server.parser_chain import Delta, message

DONE = b"data: [DONE]\n\n"
NO_USAGE = b'],"usage":null}\n\n'  # the end of an event, in streams with usage


@dataclass(slots=True)
class Usage:
    """Token counts of a request. `num_cached` is None if it is not reported."""

    num_prompt: int = 0
    num_output: int = 0
    num_cached: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the usage in OpenAI's shape."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_output,
            "total_tokens": self.num_prompt + self.num_output,
        }
        if self.num_cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.num_cached}
        return usage


@dataclass(slots=True)
class Answer:
    """A finished choice. `deltas` make up the message of a chat."""

    text: str = ""
    deltas: Sequence[Delta] = ()
    finish_reason: str = ""
    stop_string: str | None = None  # the stop string that ended it
    logprobs: AnswerLogprobs | None = None
    token_ids: list[int] = field(default_factory=list)
    prompt: ScoredPrompt | None = None  # its log-probabilities, if they are wanted


class ResponseFormat(ABC):
    """The format of one request's answer, whole or as a stream of events. Each API has its own.

    A stream is `opening`, the events of `event`, and `closing` or `failure`. The opening is written
    last, but sent first.
    """

    id: str  # of the answer
    takes_deltas = False  # whether `event` is called for whole answers too, as for streams

    @abstractmethod
    def opening(self, num_choices: int, usage: Usage) -> bytes:
        """Return the events that precede all text."""

    @abstractmethod
    def event(
        self, index: int, delta: Delta, finish_reason: str | None, extra: Mapping[str, Any]
    ) -> bytes:
        """Return the events of a delta. `extra` may have "logprobs" and "token_ids"."""

    @abstractmethod
    def closing(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """Return the events that follow all text."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """Return the last events of a stream that an error ends."""

    @abstractmethod
    def body(
        self, answers: Sequence[Answer], usage: Usage, wants_logprobs: bool, wants_ids: bool
    ) -> bytes:
        """Return a whole answer."""

    def pieces(
        self, answers: Sequence[Answer], usage: Usage, wants_logprobs: bool, wants_ids: bool
    ) -> Iterator[bytes]:
        """Yield a whole answer in pieces. Log-probabilities make it long."""
        yield self.body(answers, usage, wants_logprobs, wants_ids)

    @abstractmethod
    def logprobs(self, found: AnswerLogprobs) -> Any:
        """Return the log-probabilities of tokens for `event`, or None if the format has none."""


class OpenAIFormat(ResponseFormat):
    """The common part of completions and chats. The fields that all events share are encoded once."""

    prefix: str
    kind: str
    event_kind: str

    def __init__(self, model: str, tokenizer: Tokenizer | None, wants_usage: bool) -> None:
        # The id of the HTTP request, so that one string finds both in the log.
        self.id = f"{self.prefix}-{current_request_id.get() or uuid.uuid4().hex}"
        self._wants_usage = wants_usage
        self._model = model
        self._tokenizer = tokenizer
        self._writer = LogprobWriter(tokenizer)
        self._created = int(time.time())
        head = f'data: {{"id":"{self.id}","object":"{self.event_kind}","created":{self._created},'
        self._head = (head + f'"model":{quote(model)},"choices":[').encode()
        self._tail = NO_USAGE if wants_usage else b"]}\n\n"

    def opening(self, num_choices: int, usage: Usage) -> bytes:
        return b""

    def closing(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        if not self._wants_usage:
            return DONE
        return self._head + b'],"usage":' + json.dumps(usage.as_json()).encode() + b"}\n\n" + DONE

    def failure(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n" + DONE

    def body(
        self, answers: Sequence[Answer], usage: Usage, wants_logprobs: bool, wants_ids: bool
    ) -> bytes:
        return b"".join(self.pieces(answers, usage, wants_logprobs, wants_ids))

    def pieces(
        self, answers: Sequence[Answer], usage: Usage, wants_logprobs: bool, wants_ids: bool
    ) -> Iterator[bytes]:
        whole = {
            "id": self.id,
            "object": self.kind,
            "created": self._created,
            "model": self._model,
        }
        yield json.dumps(whole)[:-1].encode() + b', "choices": ['
        for index, answer in enumerate(answers):
            choice = {
                "index": index,
                **self.content(answer),
                "finish_reason": answer.finish_reason,
                **({"token_ids": answer.token_ids} if wants_ids else {}),
            }
            start = ", " if index else ""
            yield f'{start}{json.dumps(choice)[:-1]}, "logprobs": '.encode()
            if wants_logprobs:
                yield from map(str.encode, self.all_logprobs(answer))
            else:
                yield b"null"
            yield from map(str.encode, self.choice_extra(answer))
            yield b"}"
        yield f'], "usage": {json.dumps(usage.as_json())}'.encode()
        yield from map(str.encode, self.body_extra(answers))
        yield b"}"

    @abstractmethod
    def all_logprobs(self, answer: Answer) -> Iterator[str]:
        """Yield the JSON of an answer's log-probabilities."""

    def choice_extra(self, answer: Answer) -> Iterator[str]:
        """Yield more JSON fields of a choice, each after a comma."""
        yield from ()

    def body_extra(self, answers: Sequence[Answer]) -> Iterator[str]:
        """Yield more JSON fields of a whole answer, each after a comma."""
        yield from ()

    @abstractmethod
    def content(self, answer: Answer) -> dict[str, Any]:
        """Return the fields of a choice that hold its text."""

    def _prompt_logprobs(self, prompt: ScoredPrompt | None) -> Iterator[str]:
        """Yield the field `prompt_logprobs` after a comma, if it is wanted."""
        if prompt is not None and prompt.num_top is not None:
            yield ', "prompt_logprobs": '
            yield from self._writer.prompt(prompt)


class CompletionFormat(OpenAIFormat):
    """Answers of /v1/completions."""

    prefix, kind, event_kind = "cmpl", "text_completion", "text_completion"

    def event(
        self, index: int, delta: Delta, finish_reason: str | None, extra: Mapping[str, Any]
    ) -> bytes:
        assert isinstance(delta, str), "completions have no parsers"
        reason = "null" if finish_reason is None else f'"{finish_reason}"'
        more = _more(extra) if extra else ',"logprobs":null'
        choice = f'{{"index":{index},"text":{quote(delta)}{more},"finish_reason":{reason}}}'
        return self._head + choice.encode() + self._tail

    def content(self, answer: Answer) -> dict[str, Any]:
        return {"text": answer.text}

    def logprobs(self, found: AnswerLogprobs) -> str:
        return "".join(self._writer.completion(found))

    def all_logprobs(self, answer: Answer) -> Iterator[str]:
        found = answer.logprobs or AnswerLogprobs()
        if answer.prompt is not None and answer.prompt.is_echoed:
            echoed = answer.prompt.echoed(self._tokenizer)
            echoed.extend(found)
            found = echoed
        return self._writer.completion(found)

    def choice_extra(self, answer: Answer) -> Iterator[str]:
        return self._prompt_logprobs(answer.prompt)


class ChatFormat(OpenAIFormat):
    """Answers of /v1/chat/completions."""

    prefix, kind, event_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, num_choices: int, usage: Usage) -> bytes:
        role = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return b"".join(
            self._head + f'{{"index":{index},{role}'.encode() + self._tail
            for index in range(num_choices)
        )

    def event(
        self, index: int, delta: Delta, finish_reason: str | None, extra: Mapping[str, Any]
    ) -> bytes:
        events = b""
        if delta or extra:
            more = _more(extra) if extra else ',"logprobs":null'
            fields = (
                f'{{"content":{quote(delta)}}}' if isinstance(delta, str) else json.dumps(delta)
            )
            choice = f'{{"index":{index},"delta":{fields}{more},"finish_reason":null}}'
            events = self._head + choice.encode() + self._tail
        if finish_reason is not None:
            end = f'{{"index":{index},"delta":{{}},"logprobs":null,"finish_reason":"{finish_reason}"}}'
            events += self._head + end.encode() + self._tail
        return events

    def content(self, answer: Answer) -> dict[str, Any]:
        return {"message": message(answer.deltas)}

    def logprobs(self, found: AnswerLogprobs) -> str:
        return "".join(self._writer.chat(found))

    def all_logprobs(self, answer: Answer) -> Iterator[str]:
        return self._writer.chat(answer.logprobs or AnswerLogprobs())

    def body_extra(self, answers: Sequence[Answer]) -> Iterator[str]:
        return self._prompt_logprobs(answers[0].prompt)


class RunningUsageFormat(ResponseFormat):
    """Puts the usage so far into every event of a stream."""

    def __init__(self, inner: OpenAIFormat, usage: Usage) -> None:
        """`inner` has events with a null usage."""
        self.id = inner.id
        self._inner = inner
        self._usage = usage

    def opening(self, num_choices: int, usage: Usage) -> bytes:
        return self._filled(self._inner.opening(num_choices, usage))

    def event(
        self, index: int, delta: Delta, finish_reason: str | None, extra: Mapping[str, Any]
    ) -> bytes:
        return self._filled(self._inner.event(index, delta, finish_reason, extra))

    def closing(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        return self._inner.closing(answers, usage)

    def failure(self, error: ApiError) -> bytes:
        return self._inner.failure(error)

    def body(
        self, answers: Sequence[Answer], usage: Usage, wants_logprobs: bool, wants_ids: bool
    ) -> bytes:
        return self._inner.body(answers, usage, wants_logprobs, wants_ids)

    def logprobs(self, found: AnswerLogprobs) -> Any:
        return self._inner.logprobs(found)

    def _filled(self, events: bytes) -> bytes:
        # Text cannot contain the end of an event: JSON has no raw newlines.
        usage = json.dumps(self._usage.as_json()).encode()
        return events.replace(NO_USAGE, b'],"usage":' + usage + b"}\n\n")


def _more(extra: Mapping[str, Any]) -> str:
    """Return the JSON of optional fields, each after a comma."""
    logprobs = extra.get("logprobs", "null")
    ids = f',"token_ids":{extra["token_ids"]}' if "token_ids" in extra else ""
    return f',"logprobs":{logprobs}{ids}'
