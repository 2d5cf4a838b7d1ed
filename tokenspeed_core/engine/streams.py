"""The outputs of one request as they come from an engine process, for `AsyncLLM`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tokenspeed_core.api.sampling import SamplingParams
from tokenspeed_core.engine.messages import PromptLogprobs, TokenLogprobs
from tokenspeed_core.engine.outputs import (
    Logprob,
    RequestOutput,
    SequenceOutput,
    make_assembler,
    read_logprobs,
    read_prompt_logprobs,
)
from tokenspeed_core.engine.prompts import EncodedPrompt
from tokenspeed_core.errors import RequestFailedError
from tokenspeed_core.text import Tokenizer


class RequestStream:
    """Collects the outputs of a request's sequences; one task waits on it.

    A task that is slower than the engine gets the tokens of several steps at once.
    """

    def __init__(
        self,
        request_id: str,
        prompt: EncodedPrompt,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        *,
        is_delta: bool,
    ) -> None:
        """With `is_delta`, every output has only what is new since the one before."""
        self.sequences = [SequenceStream(self, params, tokenizer) for _ in range(params.n)]
        self.num_cached_tokens = 0
        self._request_id = request_id
        self._prompt = prompt
        self._prompt_ids = prompt.token_ids.tolist()
        self._params = params
        self._is_delta = is_delta
        self._prompt_parts: list[PromptLogprobs] = []
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._error: RequestFailedError | None = None
        self._has_news = asyncio.Event()

    @property
    def is_finished(self) -> bool:
        """Whether all sequences ended."""
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    async def next(self) -> RequestOutput:
        """Wait for tokens, and return the outputs. Raises RequestFailedError if the engine cannot finish."""
        await self._has_news.wait()
        self._has_news.clear()
        if self._error is not None:
            raise self._error
        outputs = [each.output(i, self._is_delta) for i, each in enumerate(self.sequences)]
        return RequestOutput(
            self._prompt.text,
            self._prompt_ids,
            outputs,
            self.num_cached_tokens,
            self._read_prompt_logprobs(),
            self._request_id,
            self.is_finished,
        )

    def notify(self) -> None:
        """Wake the task that waits."""
        self._has_news.set()

    def add_prompt(self, logprobs: PromptLogprobs) -> None:
        """Add log-probabilities of the next prompt tokens."""
        self._prompt_parts.append(logprobs)

    def abort(self) -> None:
        """End the sequences that still run, with the finish reason "abort"."""
        for sequence in self.sequences:
            sequence.finish_reason = sequence.finish_reason or "abort"
        self.notify()

    def fail(self, error: RequestFailedError) -> None:
        """End the request with an error."""
        self._error = self._error or error
        self.notify()

    def _read_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        num_top = self._params.prompt_logprobs
        if num_top is not None and self._prompt_logprobs is None:
            read = read_prompt_logprobs(self._prompt_parts, self._prompt_ids, num_top)
            self._prompt_logprobs = [None, *read]
            self._prompt_parts = []
        return self._prompt_logprobs


class SequenceStream:
    """One sequence of a request: a sink of the engine's client."""

    def __init__(
        self, request: RequestStream, params: SamplingParams, tokenizer: Tokenizer | None
    ) -> None:
        self.finish_reason: str | None = None
        self._request = request
        self._num_top = params.logprobs
        self._has_text = tokenizer is not None
        self._assembler = make_assembler(params, tokenizer)
        self._token_ids: list[int] = []
        self._text = ""
        self._logprobs: list[dict[int, Logprob]] = []

    def take(
        self, token_ids: Sequence[int], finish: int, num_cached: int, logprobs: TokenLogprobs | None
    ) -> bool:
        """Add tokens. Return whether the sequence is over, possibly by a stop string."""
        if self.finish_reason is not None:
            return True
        request, assembler = self._request, self._assembler
        request.num_cached_tokens = request.num_cached_tokens or num_cached
        self._text += assembler.feed(token_ids, finish)
        self._token_ids += token_ids
        if self._num_top is not None:
            self._logprobs += read_logprobs(token_ids, logprobs, self._num_top)
        self.finish_reason = assembler.finish_reason
        if self.finish_reason == "error":
            request.fail(
                RequestFailedError(
                    "internal",
                    "the engine could not finish a sequence: its step failed on the device, or the model "
                    "returned no finite logits; see the log",
                )
            )
        request.notify()
        return self.finish_reason is not None

    def take_prompt(self, logprobs: PromptLogprobs) -> None:
        """Add log-probabilities of the next prompt tokens."""
        self._request.add_prompt(logprobs)

    def fail(self, error: RequestFailedError) -> None:
        """End the whole request with an error."""
        self._request.fail(error)

    def output(self, index: int, is_delta: bool) -> SequenceOutput:
        """Return the output so far, or with `is_delta` what is new since the last call."""
        token_ids, text, logprobs = self._token_ids, self._text, self._logprobs
        if is_delta:
            self._token_ids, self._text, self._logprobs = [], "", []
        else:
            token_ids, logprobs = token_ids.copy(), logprobs.copy()
        return SequenceOutput(
            index,
            token_ids,
            text if self._has_text else None,
            self.finish_reason,
            None if self._num_top is None else logprobs,
        )
