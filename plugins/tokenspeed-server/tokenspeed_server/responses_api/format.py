"""The answers of the Responses API: output items, whole or as a stream of events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from tokenspeed_core.commands.serving import Tokenizer
from tokenspeed_server.errors import ApiError
from tokenspeed_server.formats import Answer, ChatFormat, ResponseFormat, Usage
from tokenspeed_server.logprobs import AnswerLogprobs
from tokenspeed_server.parser_chain import Delta
from tokenspeed_server.reply_parts import Kind, Part, begins_block, parts_of
from tokenspeed_server.responses_api.protocol import ResponsesRequest

NUM_OPENING_EVENTS = 2

_PREFIXES: dict[Kind, str] = {"text": "msg", "reasoning": "rs", "call": "fc"}
_DELTA_EVENTS: dict[Kind, str] = {
    "text": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "call": "response.function_call_arguments.delta",
}


@dataclass(slots=True)
class _OpenItem:
    """The output item that the model writes now."""

    kind: Kind
    index: int
    call_id: str | None = None
    name: str = ""
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    id: str = ""

    def __post_init__(self) -> None:
        self.id = f"{_PREFIXES[self.kind]}_{uuid.uuid4().hex}"

    def part(self, text: str) -> dict[str, Any]:
        """Return the content part with this text."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs}

    def item(
        self, status: str, content: list[dict[str, Any]], arguments: str = ""
    ) -> dict[str, Any]:
        """Return the item with this content."""
        head = {"id": self.id, "status": status}
        if self.kind == "text":
            return {**head, "type": "message", "role": "assistant", "content": content}
        if self.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": content}
        call = {"call_id": self.call_id, "name": self.name, "arguments": arguments}
        return {**head, "type": "function_call", **call}


class ResponsesFormat(ResponseFormat):
    """One answer of /v1/responses. It collects the output items of whole answers too."""

    takes_deltas = True

    def __init__(
        self,
        response_id: str,
        body: ResponsesRequest,
        model: str,
        tokenizer: Tokenizer | None,
        usage: Usage,
        on_end: Callable[[bytes], None],
    ) -> None:
        """Create the format of one response. `on_end` receives the complete response."""
        self.id = response_id
        self._usage = usage  # grows while the answer is written
        self._is_stream = body.stream
        self._on_end = on_end
        self._tokenizer = tokenizer
        self._chat = ChatFormat(model, tokenizer, wants_usage=False)
        self._response = _unfinished(response_id, body, model)
        self._output: list[dict[str, Any]] = []
        self._open: _OpenItem | None = None
        self._sequence_number = NUM_OPENING_EVENTS
        self._num_reasoning = 0  # tokens
        self._head = ""  # of the open item's deltas

    def opening(self, num_choices: int, usage: Usage) -> bytes:
        begun = {"response": self._response}
        return b"".join(
            _encode(name, number, begun)
            for number, name in enumerate(("response.created", "response.in_progress"))
        )

    def event(
        self, index: int, delta: Delta, finish_reason: str | None, extra: Mapping[str, Any]
    ) -> bytes:
        item = self._open
        if (
            isinstance(delta, str)
            and delta
            and item is not None
            and item.kind == "text"
            and not extra
        ):
            item.texts.append(delta)  # the common case, for each token
            return self._delta(delta) if self._is_stream else b""
        scored = json.loads(extra["logprobs"])["content"] if "logprobs" in extra else []
        events = b"".join(self._part(part, scored) for part in parts_of(delta))
        return events if self._is_stream else b""

    def closing(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        events, status = self._finish(answers[0])
        self._on_end(json.dumps(self._response).encode())
        return events + self._event(f"response.{status}", response=self._response)

    def failure(self, error: ApiError) -> bytes:
        problem = {"code": "server_error", "message": error.message}
        failed = {**self._response, "status": "failed", "error": problem, "output": self._output}
        return self._event("response.failed", response=failed)

    def body(
        self, answers: Sequence[Answer], usage: Usage, wants_logprobs: bool, wants_ids: bool
    ) -> bytes:
        self._finish(answers[0])
        body = json.dumps(self._response).encode()
        self._on_end(body)
        return body

    def logprobs(self, found: AnswerLogprobs) -> str:
        return self._chat.logprobs(found)

    def _finish(self, answer: Answer) -> tuple[bytes, str]:
        """Complete the response; return the last events of its items, and its status."""
        is_cut = answer.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        events = self._close(status)
        self._response |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "completed_at": None if is_cut else int(time.time()),
            "output": self._output,
            "usage": _usage(self._usage, min(self._num_reasoning, self._usage.num_output)),
        }
        return events, status

    def _part(self, part: Part, logprobs: list[dict[str, Any]]) -> bytes:
        events = b""
        kind = None if self._open is None else self._open.kind
        if begins_block(part, kind):
            events = self._close("completed") + self._begin(part)
        assert self._open is not None
        self._open.texts.append(part.text)
        if part.kind == "text":
            self._open.logprobs += logprobs
            return events + self._delta(part.text, logprobs)
        return events + self._delta(part.text) if part.text else events

    def _begin(self, part: Part) -> bytes:
        """Begin an item; return the events that announce it."""
        item = self._open = _OpenItem(part.kind, len(self._output), part.call_id, part.name)
        where = f'"item_id":"{item.id}","output_index":{item.index},'
        content = "" if part.kind == "call" else '"content_index":0,'
        name = _DELTA_EVENTS[part.kind]
        self._head = f'event: {name}\ndata: {{"type":"{name}",{where}{content}"sequence_number":'
        events = self._event(
            "response.output_item.added", output_index=item.index, item=item.item("in_progress", [])
        )
        if part.kind == "call":
            return events
        return events + self._event(
            "response.content_part.added", **self._place(item), part=item.part("")
        )

    def _close(self, status: str) -> bytes:
        """Finish the open item; return its final events."""
        item, self._open = self._open, None
        if item is None:
            return b""
        text = "".join(item.texts)
        if item.kind == "call":
            whole = item.item(status if _is_object(text) else "incomplete", [], text)
            events = self._event(
                "response.function_call_arguments.done",
                item_id=item.id,
                output_index=item.index,
                name=item.name,
                arguments=text,
            )
        else:
            if item.kind == "reasoning" and self._tokenizer is not None:
                # Not by `usage`: the tokens of a step arrive together, and the last ones may not be reasoning.
                self._num_reasoning += self._tokenizer.count(text)
            part = item.part(text)
            whole = item.item(status, [part])
            events = self._text_done(item, text) + self._event(
                "response.content_part.done", **self._place(item), part=part
            )
        self._output.append(whole)
        return events + self._event(
            "response.output_item.done", output_index=item.index, item=whole
        )

    def _text_done(self, item: _OpenItem, text: str) -> bytes:
        if item.kind == "reasoning":
            return self._event("response.reasoning_text.done", **self._place(item), text=text)
        return self._event(
            "response.output_text.done", **self._place(item), text=text, logprobs=item.logprobs
        )

    def _delta(self, text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> bytes:
        if not self._is_stream:
            return b""
        number = self._sequence_number
        self._sequence_number = number + 1
        assert self._open is not None
        more = f',"logprobs":{json.dumps(list(logprobs))}' if self._open.kind == "text" else ""
        return f'{self._head}{number},"delta":{quote(text)}{more}}}\n\n'.encode()

    def _event(self, name: str, /, **fields: Any) -> bytes:
        if not self._is_stream:
            return b""
        number = self._sequence_number
        self._sequence_number = number + 1
        return _encode(name, number, fields)

    @staticmethod
    def _place(item: _OpenItem) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": item.index, "content_index": 0}


def _encode(name: str, sequence_number: int, fields: Mapping[str, Any]) -> bytes:
    data = json.dumps({"type": name, "sequence_number": sequence_number, **fields})
    return f"event: {name}\ndata: {data}\n\n".encode()


def _unfinished(response_id: str, body: ResponsesRequest, model: str) -> dict[str, Any]:
    """Return the response before its output, with the parameters of its request."""
    reasoning, choice = body.reasoning, body.tool_choice
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store,
        "temperature": body.temperature,
        "text": {"format": _text_format(body)},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs,
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _text_format(body: ResponsesRequest) -> dict[str, Any]:
    if body.text is None or body.text.format is None:
        return {"type": "text"}
    return body.text.format.model_dump(by_alias=True, exclude_none=True)


def _usage(usage: Usage, num_reasoning: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt,
        "input_tokens_details": {
            "cached_tokens": usage.num_cached or 0,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.num_output,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": usage.num_prompt + usage.num_output,
    }


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except (ValueError, RecursionError):
        return False
