"""Streams the outputs of one request from an engine process to `AsyncLLM`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tokenspeed_core.api.sampling import SamplingParams
from tokenspeed_core.engine.inputs import EncodedPrompt
from tokenspeed_core.engine.messages import TokenLogprobs
from tokenspeed_core.engine.outputs import RequestOutput, SequenceCollector, make_output
from tokenspeed_core.errors import RequestFailedError
from tokenspeed_core.text.tokenizer import Tokenizer


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
        """With `is_delta`, an output has only the tokens since the previous output."""
        self.sequences = [SequenceStream(self, params, tokenizer) for _ in range(params.n)]
        self._request_id = request_id
        self._prompt = prompt
        self._prompt_ids = prompt.token_ids.tolist()
        self._is_delta = is_delta
        self._error: RequestFailedError | None = None
        self._has_news = asyncio.Event()

    async def next(self) -> RequestOutput:
        """Wait for tokens, and return the outputs. Raises RequestFailedError if the engine cannot finish."""
        await self._has_news.wait()
        self._has_news.clear()
        if self._error is not None:
            raise self._error
        return make_output(
            self._prompt,
            self._prompt_ids,
            self.sequences,
            self._request_id,
            is_delta=self._is_delta,
        )

    def notify(self) -> None:
        """Wake the task that waits."""
        self._has_news.set()

    def abort(self) -> None:
        """End the sequences that still run, with the finish reason "abort"."""
        for sequence in self.sequences:
            sequence.finish_reason = sequence.finish_reason or "abort"
        self.notify()

    def fail(self, error: RequestFailedError) -> None:
        """End the request with an error."""
        self._error = self._error or error
        self.notify()


class SequenceStream(SequenceCollector):
    """One sequence of a request: a sink of the engine's client."""

    def __init__(
        self, request: RequestStream, params: SamplingParams, tokenizer: Tokenizer | None
    ) -> None:
        super().__init__(params, tokenizer, is_streamed=True)
        self._request = request

    def take(
        self, token_ids: Sequence[int], finish: int, num_cached: int, logprobs: TokenLogprobs | None
    ) -> bool:
        """Add tokens and wake the task. Return whether they end the sequence, possibly by a stop string."""
        is_over = super().take(token_ids, finish, num_cached, logprobs)
        self._request.notify()
        return is_over

    def fail(self, error: RequestFailedError) -> None:
        """End the whole request with an error."""
        self._request.fail(error)
