"""The JSON of answers: events of streams and whole bodies, for completions and for chats."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from tokenspeed_core.commands.serving import Tokenizer
from tokenspeed_server.parser_chain import Delta, message

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability, the top alternatives, and the token's offset in the text."""

    token_id: int
    value: float
    top: Sequence[tuple[int, float]]  # ids and values, most probable first
    text_offset: int


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
    logprobs: list[TokenLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


class ResponseFormat(ABC):
    """The format of one request's answer. The parts that all events share are encoded once."""

    prefix: str
    kind: str
    event_kind: str

    def __init__(self, model: str, tokenizer: Tokenizer | None, wants_usage: bool) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._model = model
        self._tokenizer = tokenizer
        self._created = int(time.time())
        head = f'data: {{"id":"{self.id}","object":"{self.event_kind}","created":{self._created},'
        self._head = (head + f'"model":{quote(model)},"choices":[').encode()
        self._tail = b'],"usage":null}\n\n' if wants_usage else b"]}\n\n"

    def opening(self, num_choices: int) -> bytes:
        """Return the events that precede all text."""
        return b""

    def usage(self, usage: Usage) -> bytes:
        """Return the event with the usage."""
        return self._head + b'],"usage":' + json.dumps(usage.as_json()).encode() + b"}\n\n"

    def body(
        self, answers: Sequence[Answer], usage: Usage, wants_logprobs: bool, wants_ids: bool
    ) -> bytes:
        """Return a whole answer."""
        choices = [
            {
                "index": index,
                **self.content(answer),
                "finish_reason": answer.finish_reason,
                "logprobs": self.logprobs(answer.logprobs) if wants_logprobs else None,
                **({"token_ids": answer.token_ids} if wants_ids else {}),
            }
            for index, answer in enumerate(answers)
        ]
        return json.dumps(
            {
                "id": self.id,
                "object": self.kind,
                "created": self._created,
                "model": self._model,
                "choices": choices,
                "usage": usage.as_json(),
            }
        ).encode()

    @abstractmethod
    def event(
        self, index: int, delta: Delta, finish_reason: str | None, extra: Mapping[str, Any]
    ) -> bytes:
        """Return the events of a delta. `extra` may have "logprobs" and "token_ids"."""

    @abstractmethod
    def content(self, answer: Answer) -> dict[str, Any]:
        """Return the fields of a choice that hold its text."""

    @abstractmethod
    def logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the log-probabilities of tokens."""

    def _token(self, token_id: int) -> tuple[str, bytes]:
        piece = b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)
        return piece.decode(errors="replace"), piece


class CompletionFormat(ResponseFormat):
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

    def logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        tops = []
        for entry in entries:
            top: dict[str, float] = {}
            for token_id, value in entry.top:
                top.setdefault(self._token(token_id)[0], value)
            top.setdefault(self._token(entry.token_id)[0], entry.value)
            tops.append(top)
        return {
            "tokens": [self._token(entry.token_id)[0] for entry in entries],
            "token_logprobs": [entry.value for entry in entries],
            "top_logprobs": tops,
            "text_offset": [entry.text_offset for entry in entries],
        }


class ChatFormat(ResponseFormat):
    """Answers of /v1/chat/completions."""

    prefix, kind, event_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, num_choices: int) -> bytes:
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

    def logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._entry(entry.token_id, entry.value),
                    "top_logprobs": [self._entry(token_id, value) for token_id, value in entry.top],
                }
                for entry in entries
            ],
            "refusal": None,
        }

    def _entry(self, token_id: int, value: float) -> dict[str, Any]:
        token, piece = self._token(token_id)
        return {"token": token, "logprob": value, "bytes": list(piece)}


def _more(extra: Mapping[str, Any]) -> str:
    """Return the JSON of optional fields, each after a comma."""
    logprobs = json.dumps(extra["logprobs"]) if "logprobs" in extra else "null"
    ids = f',"token_ids":{extra["token_ids"]}' if "token_ids" in extra else ""
    return f',"logprobs":{logprobs}{ids}'
