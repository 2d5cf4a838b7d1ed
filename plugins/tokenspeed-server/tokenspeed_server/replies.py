"""What an HTTP request waits for: its choices, filled by the engine's tokens, and what is ready to be sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenspeed_core.commands.serving import (
    Assembler,
    FinishReason,
    RequestFailedError,
    TokenLogprobs,
)
from tokenspeed_server.chat_reply import Delta, Reader
from tokenspeed_server.errors import ApiError
from tokenspeed_server.events import Answer, Dialect, TokenLogprob, Usage

MIN_LOGPROB = -9999.0  # what OpenAI writes for minus infinity, which JSON lacks


@dataclass(frozen=True, slots=True)
class Shape:
    """How an answer is to look. `interval`: tokens per streamed event."""

    is_stream: bool
    interval: int = 1
    num_logprobs: int = -1
    wants_ids: bool = False


class Reply:
    """Collects the choices of one HTTP request; one task waits on it."""

    def __init__(self, dialect: Dialect, shape: Shape, usage: Usage) -> None:
        self.dialect = dialect
        self.shape = shape
        self.usage = usage
        self.answers: list[Answer] = []
        self.num_open = 0
        self.error: ApiError | None = None
        self.is_abandoned = False  # the client is gone
        self.first_token_at: float | None = None  # on the monotonic clock, in seconds
        self._ready: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None

    def add_choice(
        self, assembler: Assembler, reader: Reader, *, is_first_of_prompt: bool
    ) -> Choice:
        """Return the sink for one more sequence."""
        index = len(self.answers)
        self.answers.append(Answer())
        self.num_open += 1
        return Choice(self, index, assembler, reader, is_first_of_prompt, self.shape.interval - 1)

    def push(self, event: bytes) -> None:
        """Make an event ready to be sent."""
        self._ready.append(event)
        self._wake()

    def fail(self, error: ApiError) -> None:
        """End the whole request with an error."""
        if self.error is None:
            self.error = error
            self._wake()

    def abandon(self) -> None:
        """Note that the client is gone."""
        self.is_abandoned = True
        self._wake()

    def end_choice(self) -> None:
        """Count a choice as done."""
        self.num_open -= 1
        if not self.num_open:
            self._wake()

    async def wait(self) -> bytes:
        """Wait for events, the end, an error or the client's leaving; return the events, joined."""
        while not (self._ready or self.error or self.is_abandoned or not self.num_open):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        ready, self._ready = self._ready, []
        return b"".join(ready)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(slots=True, eq=False)
class Choice:
    """One sequence's place in a reply: the engine link hands its tokens to `take`."""

    reply: Reply
    index: int
    assembler: Assembler
    reader: Reader
    is_first_of_prompt: bool
    num_waiting: int  # tokens since the last event; one short of the interval at first: the first goes out at once
    _text: list[str] = field(default_factory=list)
    _logprobs: list[TokenLogprob] = field(default_factory=list)
    _token_ids: list[int] = field(default_factory=list)

    def take(
        self, token_ids: Sequence[int], finish: int, num_cached: int, logprobs: TokenLogprobs | None
    ) -> bool:
        """Add tokens. Return whether the sequence is at its end, whatever the engine thinks."""
        reply, assembler = self.reply, self.assembler
        if reply.first_token_at is None and token_ids:
            reply.first_token_at = time.monotonic()
        if num_cached and self.is_first_of_prompt and reply.usage.num_cached is not None:
            reply.usage.num_cached += num_cached
        num_before = assembler.num_tokens
        if logprobs is not None and reply.shape.num_logprobs >= 0:
            text = self._feed_with_logprobs(token_ids, finish, logprobs)
        else:
            text = assembler.feed(token_ids, finish)
        reply.usage.num_output += assembler.num_tokens - num_before
        if reply.shape.wants_ids:
            self._token_ids += token_ids
        reason = assembler.finish_reason
        if reason is None:
            if reply.shape.is_stream:
                self._stream(text, len(token_ids))
            else:
                self._text.append(text)
            return False
        self._end(text, reason)
        return True

    def fail(self, error: RequestFailedError) -> None:
        """End the whole request with an error."""
        self.reply.fail(ApiError.of(error))

    def _stream(self, text: str, num_tokens: int) -> None:
        self.num_waiting += num_tokens
        if self.num_waiting < self.reply.shape.interval:
            self._text.append(text)
            return
        if self._text:
            text = "".join(self._text) + text
            self._text.clear()
        deltas = self.reader.read(text, is_over=False)
        if deltas or self._token_ids:
            self._emit(deltas, None)
            self.num_waiting = 0
        # Otherwise a character, a stop string or a parser's mark is half here: the next token decides.

    def _emit(self, deltas: Sequence[Delta], reason: str | None) -> None:
        reply = self.reply
        extra: dict[str, object] = {}
        if self._logprobs:
            extra["logprobs"] = reply.dialect.logprobs(self._logprobs)
            self._logprobs = []
        if self._token_ids:
            extra["token_ids"] = self._token_ids
            self._token_ids = []
        for delta in deltas[:-1]:
            reply.push(reply.dialect.event(self.index, delta, None, {}))
        reply.push(reply.dialect.event(self.index, deltas[-1] if deltas else "", reason, extra))

    def _end(self, text: str, reason: str) -> None:
        reply = self.reply
        if reason in ("abort", "error"):
            status = 500 if reason == "error" else 503
            reply.fail(
                ApiError(
                    status,
                    "the engine could not finish this request; its log says why",
                    code=reason,
                )
            )
            return
        text = "".join(self._text) + text
        deltas = self.reader.read(text, is_over=True)
        reason = "tool_calls" if reason == "stop" and self.reader.has_called else reason
        answer = reply.answers[self.index]
        answer.finish_reason = reason
        if reply.shape.is_stream:
            self._emit(deltas, reason)
        else:
            answer.text, answer.deltas = text, deltas
            answer.logprobs, answer.token_ids = self._logprobs, self._token_ids
        reply.end_choice()

    def _feed_with_logprobs(
        self, token_ids: Sequence[int], finish: int, columns: TokenLogprobs
    ) -> str:
        """Feed token by token, since each one's place in the text is reported."""
        assembler, text = self.assembler, []
        width = self.reply.shape.num_logprobs
        for position, token_id in enumerate(token_ids):
            offset = assembler.num_chars
            is_last = position == len(token_ids) - 1
            text.append(assembler.feed((token_id,), finish if is_last else FinishReason.NOT))
            top = [
                (other, max(MIN_LOGPROB, value)) for other, value in columns.top[position][:width]
            ]
            self._logprobs.append(
                TokenLogprob(token_id, max(MIN_LOGPROB, columns.chosen[position]), top, offset)
            )
            if assembler.finish_reason is not None:
                break
        if not token_ids:
            text.append(assembler.feed(token_ids, finish))
        return "".join(text)
