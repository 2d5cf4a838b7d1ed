"""The answers of the Messages API: typed content blocks, whole or as a stream of events."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from tokenspeed_server.anthropic.errors import error_body
from tokenspeed_server.errors import ApiError
from tokenspeed_server.formats import Answer, ResponseFormat, Usage
from tokenspeed_server.logprobs import AnswerLogprobs
from tokenspeed_server.parser_chain import Delta
from tokenspeed_server.reply_parts import Block, Kind, Part, begins_block, blocks_of, parts_of

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS: dict[Kind, str] = {
    "text": '"type":"text_delta","text":',
    "reasoning": '"type":"thinking_delta","thinking":',
    "call": '"type":"input_json_delta","partial_json":',
}


class MessagesFormat(ResponseFormat):
    """One answer of /v1/messages."""

    def __init__(self, model: str, *, hides_thinking: bool = False) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self._model = model
        self._hides_thinking = hides_thinking
        self._kind: Kind | None = None  # of the open block
        self._index = -1  # of the open block
        self._head = b""  # of the open block's deltas

    def opening(self, num_choices: int, usage: Usage) -> bytes:
        message = self._message([], None, None, _usage(usage, num_output=0))
        return _event("message_start", {"message": message})

    def event(
        self, index: int, delta: Delta, finish_reason: str | None, extra: Mapping[str, Any]
    ) -> bytes:
        if isinstance(delta, str) and self._kind == "text" and delta:
            return self._head + quote(delta).encode() + b"}}\n\n"  # the common case, for each token
        return b"".join(map(self._part, parts_of(delta)))

    def closing(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        delta = dict(zip(("stop_reason", "stop_sequence"), _stop(answers[0]), strict=True))
        return (
            self._close()
            + _event("message_delta", {"delta": delta, "usage": _usage(usage)})
            + _event("message_stop", {})
        )

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error_body(error) + b"\n\n"

    def body(
        self, answers: Sequence[Answer], usage: Usage, wants_logprobs: bool, wants_ids: bool
    ) -> bytes:
        content = [self._content(block) for block in blocks_of(answers[0].deltas)]
        return json.dumps(self._message(content, *_stop(answers[0]), _usage(usage))).encode()

    def logprobs(self, found: AnswerLogprobs) -> None:
        raise NotImplementedError("this API has no log-probabilities")

    def _message(
        self,
        content: list[dict[str, Any]],
        stop_reason: str | None,
        stop_sequence: str | None,
        usage: dict[str, Any],
    ) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": usage,
        }

    def _content(self, block: Block) -> dict[str, Any]:
        """Return a whole block. A call without complete arguments is text, so that nothing is lost."""
        if block.kind == "text":
            return {"type": "text", "text": block.text}
        if block.kind == "reasoning":
            text = "" if self._hides_thinking else block.text
            return {"type": "thinking", "thinking": text, "signature": self.id}
        arguments = _object(block.text)
        if arguments is None:
            return {"type": "text", "text": f"{block.name} {block.text}"}
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}

    def _part(self, part: Part) -> bytes:
        events = self._open(part) if begins_block(part, self._kind) else b""
        is_hidden = part.kind == "reasoning" and self._hides_thinking
        if part.text and not is_hidden:
            events += self._head + quote(part.text).encode() + b"}}\n\n"
        return events

    def _open(self, part: Part) -> bytes:
        """Return the end of the open block, if there is one, and the start of the part's block."""
        events = self._close()
        self._kind, self._index = part.kind, self._index + 1
        self._head = (
            "event: content_block_delta\n"
            f'data: {{"type":"content_block_delta","index":{self._index},"delta":{{{_DELTAS[part.kind]}'
        ).encode()
        blocks: dict[Kind, dict[str, Any]] = {
            "text": {"type": "text", "text": ""},
            "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
            "call": {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}},
        }
        start = {"index": self._index, "content_block": blocks[part.kind]}
        return events + _event("content_block_start", start)

    def _close(self) -> bytes:
        if self._kind is None:
            return b""
        events = b""
        if self._kind == "reasoning":
            delta = {"type": "signature_delta", "signature": self.id}
            events = _event("content_block_delta", {"index": self._index, "delta": delta})
        self._kind = None
        return events + _event("content_block_stop", {"index": self._index})


def _event(name: str, fields: Mapping[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n".encode()


def _usage(usage: Usage, *, num_output: int | None = None) -> dict[str, Any]:
    """Return the usage. As with Anthropic, the input tokens exclude those read from the cache."""
    cached = usage.num_cached or 0
    return {
        "input_tokens": usage.num_prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.num_output if num_output is None else num_output,
    }


def _stop(answer: Answer) -> tuple[str, str | None]:
    """Return the stop reason and the stop sequence of a finished answer."""
    if answer.finish_reason == "stop" and answer.stop_string is not None:
        return "stop_sequence", answer.stop_string
    return _STOP_REASONS[answer.finish_reason], None


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
