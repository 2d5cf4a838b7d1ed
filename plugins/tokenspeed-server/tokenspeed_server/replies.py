"""A reply in the making: choices that receive the engine's tokens, and events that are ready to send."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tokenspeed_core.commands.serving import (
    Assembler,
    Delivery,
    FinishReason,
    Histogram,
    PromptLogprobs,
    RequestFailedError,
    TokenLogprobs,
)
from tokenspeed_server.errors import ApiError
from tokenspeed_server.formats import Answer, ResponseFormat, Usage
from tokenspeed_server.logprobs import MIN_LOGPROB, AnswerLogprobs, ScoredPrompt
from tokenspeed_server.parser_chain import Delta, ParserChain

_NO_EXTRA: Mapping[str, object] = {}
_TOO_SLOW = ApiError(
    503, "the client does not read its response fast enough", code="client_too_slow"
)


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """How to answer. `interval`: tokens per streamed event; `num_logprobs`: -1 for none."""

    is_stream: bool
    interval: int = 1
    num_logprobs: int = -1
    wants_ids: bool = False
    records: bool = False  # keep all tokens, for the log
    max_unsent_bytes: int = 8 * 2**20  # of the events that the client has not read


@dataclass(frozen=True, slots=True)
class Timing:
    """Where a reply's times are counted, and when its request arrived on the monotonic clock."""

    first_token_times: Histogram
    token_times: Histogram
    delivery: Delivery
    started_at: float


class Reply:
    """Collects the choices of one HTTP request; one task waits on it."""

    def __init__(
        self, response_format: ResponseFormat, options: ReplyOptions, usage: Usage
    ) -> None:
        self.format = response_format
        self.options = options
        self.usage = usage
        self.answers: list[Answer] = []
        self.num_open = 0
        self.error: ApiError | None = None
        self.is_abandoned = False  # the client disconnected
        self.first_token_at: float | None = None  # on the monotonic clock, in seconds
        self.recorded: list[list[int]] = []  # tokens of each choice, if the options say so
        self.timing: Timing | None = None  # None: metrics are off
        self.grammar_field: str | None = None  # the request's field, if an error is about it
        self._ready: list[bytes] = []
        self._num_ready_bytes = 0
        self._waiter: asyncio.Future[None] | None = None

    def add_choice(
        self,
        assembler: Assembler,
        parsers: ParserChain,
        *,
        is_first_of_prompt: bool,
        echo: str = "",
        prompt: ScoredPrompt | None = None,
    ) -> Choice:
        """Add a choice. Returns the sink for the tokens of its sequence.

        `echo` begins its text. `prompt` collects the log-probabilities of its prompt.
        """
        index = len(self.answers)
        self.answers.append(Answer(prompt=prompt))
        self.num_open += 1
        num_waiting = self.options.interval - 1
        kind = RecordingChoice if self.options.records else Choice
        self.recorded.append([])
        choice = kind(self, index, assembler, parsers, is_first_of_prompt, num_waiting, len(echo))
        choice.echo(echo)
        return choice

    def push(self, event: bytes) -> None:
        """Add an event to send. A whole answer has none until its end."""
        if event:
            self._ready.append(event)
            self._num_ready_bytes += len(event)
            if self._num_ready_bytes > self.options.max_unsent_bytes:
                self.fail(_TOO_SLOW)
            self._wake()

    def fail(self, error: ApiError) -> None:
        """End the whole request with an error."""
        if self.error is None:
            self.error = error
            self._wake()

    def abandon(self) -> None:
        """Record that the client disconnected, unless the reply is over."""
        if self.num_open and self.error is None:
            self.is_abandoned = True
            self._wake()

    def end_choice(self) -> None:
        """Count a choice as done."""
        self.num_open -= 1
        if not self.num_open:
            self._wake()

    async def wait(self) -> bytes:
        """Wait for events, the end, an error or a disconnect; return the events, joined."""
        while not (self._ready or self.error or self.is_abandoned or not self.num_open):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        ready = self._ready
        self._ready = []
        self._num_ready_bytes = 0
        return ready[0] if len(ready) == 1 else b"".join(ready)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(slots=True, eq=False)
class Choice:
    """One sequence of a reply. The engine's client hands its tokens to `take`."""

    reply: Reply
    index: int
    assembler: Assembler
    parsers: ParserChain
    is_first_of_prompt: bool
    num_waiting: int  # tokens since the last event; starts so that the first token is sent at once
    num_echoed: int = 0  # characters of the prompt before the text
    _text: list[str] = field(default_factory=list)
    _logprobs: AnswerLogprobs | None = None
    _token_ids: list[int] = field(default_factory=list)
    _last_token_at: float = 0.0  # on the monotonic clock, in seconds; 0 before the first token

    def take(
        self, token_ids: Sequence[int], finish: int, num_cached: int, logprobs: TokenLogprobs | None
    ) -> bool:
        """Add tokens. Return whether the sequence is over, possibly by a stop string that the engine does not see."""
        reply, assembler = self.reply, self.assembler
        if reply.error is not None:
            return True  # no client reads the tokens, so the engine can stop
        if token_ids:
            timing, last = reply.timing, self._last_token_at
            if last and timing is not None:
                self._last_token_at = now = timing.delivery.at
                num = len(token_ids)
                timing.token_times.observe((now - last) / num, num)
            elif reply.first_token_at is None or timing is not None:
                self._observe_first_token()
        if num_cached and self.is_first_of_prompt and reply.usage.num_cached is not None:
            reply.usage.num_cached += num_cached
        num_before = assembler.num_tokens
        if logprobs is not None and reply.options.num_logprobs >= 0:
            text = self._feed_with_logprobs(token_ids, finish, logprobs)
        else:
            text = assembler.feed(token_ids, finish)
        # Up to the token that completes a stop string.
        num_kept = assembler.num_tokens - num_before
        reply.usage.num_output += num_kept
        if reply.options.wants_ids:
            self._token_ids += token_ids[:num_kept]
        reason = assembler.finish_reason
        if reason is None:
            if reply.options.is_stream:
                return self._stream(text, len(token_ids))
            self._text.append(text)
            return False
        self._end(text, reason)
        return True

    def echo(self, text: str) -> None:
        """Begin the text with the prompt."""
        if text:
            self._text.append(text)

    def take_prompt(self, logprobs: PromptLogprobs) -> None:
        """Add log-probabilities of the next prompt tokens."""
        prompt = self.reply.answers[self.index].prompt
        assert prompt is not None, "log-probabilities of the prompt were not requested"
        prompt.parts.append(logprobs)

    def fail(self, error: RequestFailedError) -> None:
        """End the whole request with an error."""
        self.reply.fail(ApiError.of(error, self.reply.grammar_field))

    def _observe_first_token(self) -> None:
        """Measure the time to the first token of a reply; time the tokens of this sequence from now on."""
        reply, timing = self.reply, self.reply.timing
        if timing is None:
            reply.first_token_at = time.monotonic()
            return
        self._last_token_at = timing.delivery.at
        if reply.first_token_at is None:
            reply.first_token_at = self._last_token_at
            timing.first_token_times.observe(self._last_token_at - timing.started_at)

    def _stream(self, text: str, num_tokens: int) -> bool:
        """Push the events of more text. Return whether the parsers ended the answer."""
        self.num_waiting += num_tokens
        if self.num_waiting < self.reply.options.interval:
            self._text.append(text)
            return False
        if self._text:
            text = "".join(self._text) + text
            self._text.clear()
        deltas = self.parsers.read(text, is_over=False)
        if deltas or self._token_ids:
            self.num_waiting = 0
            if len(deltas) == 1 and not self._token_ids and not self._logprobs:
                reply = self.reply  # the common case, for each token
                reply.push(reply.format.event(self.index, deltas[0], None, _NO_EXTRA))
            else:
                self._emit(deltas, None)
        # Otherwise a character, stop string or parser's tag may be incomplete: wait for more tokens.
        if self.parsers.is_full:
            self._end("", "stop")
        return self.parsers.is_full

    def _emit(self, deltas: Sequence[Delta], reason: str | None) -> None:
        reply = self.reply
        extra: dict[str, object] = {}
        if self._logprobs:
            extra["logprobs"] = reply.format.logprobs(self._logprobs)
            self._logprobs = None
        if self._token_ids:
            extra["token_ids"] = self._token_ids
            self._token_ids = []
        for delta in deltas[:-1]:
            reply.push(reply.format.event(self.index, delta, None, {}))
        reply.push(reply.format.event(self.index, deltas[-1] if deltas else "", reason, extra))

    def _end(self, text: str, reason: str) -> None:
        reply = self.reply
        if reason in ("abort", "error"):
            status = 500 if reason == "error" else 503
            reply.fail(
                ApiError(
                    status,
                    "the engine could not finish this request; see the server log",
                    code=reason,
                )
            )
            return
        text = "".join(self._text) + text
        deltas = self.parsers.read(text, is_over=True)
        reason = "stop" if self.parsers.is_full else reason
        reason = "tool_calls" if reason == "stop" and self.parsers.has_called else reason
        answer = reply.answers[self.index]
        answer.finish_reason = reason
        answer.stop_string = self.assembler.stop_string
        if reply.options.is_stream:
            self._emit(deltas, reason)
        else:
            answer.text, answer.deltas = text, deltas
            answer.logprobs, answer.token_ids = self._logprobs, self._token_ids
        reply.end_choice()

    def _feed_with_logprobs(
        self, token_ids: Sequence[int], finish: int, columns: TokenLogprobs
    ) -> str:
        """Feed token by token, since the offset of each in the text is reported."""
        assembler, text = self.assembler, []
        width = self.reply.options.num_logprobs
        found = self._logprobs = self._logprobs or AnswerLogprobs()
        for position, token_id in enumerate(token_ids):
            offset = self.num_echoed + assembler.num_chars
            is_last = position == len(token_ids) - 1
            text.append(assembler.feed((token_id,), finish if is_last else FinishReason.NOT))
            value = max(MIN_LOGPROB, columns.chosen[position])
            found.append(token_id, value, columns.top[position][:width], offset)
            if assembler.finish_reason is not None:
                break
        if not token_ids:
            text.append(assembler.feed(token_ids, finish))
        return "".join(text)


class RecordingChoice(Choice):
    """A choice that keeps its tokens, for the log."""

    __slots__ = ()

    def take(
        self, token_ids: Sequence[int], finish: int, num_cached: int, logprobs: TokenLogprobs | None
    ) -> bool:
        """Keep and add tokens, as `Choice.take` does."""
        self.reply.recorded[self.index] += token_ids
        return Choice.take(self, token_ids, finish, num_cached, logprobs)
