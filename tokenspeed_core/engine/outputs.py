"""The results of requests, assembled from the engine's deltas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from tokenspeed_core.api.sampling import SamplingParams
from tokenspeed_core.engine.inputs import EncodedPrompt
from tokenspeed_core.engine.messages import PromptLogprobs, Reasoning, TokenLogprobs
from tokenspeed_core.errors import RequestFailedError
from tokenspeed_core.text.assembler import Assembler, ReasoningText
from tokenspeed_core.text.detokenizer import without_text
from tokenspeed_core.text.tokenizer import Tokenizer

_FAILED = (
    "the engine could not finish a sequence: its step failed on the device, or the model "
    "returned no finite logits; see the log"
)


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability and rank (1: the most probable; 0: not computed)."""

    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """One of the `n` outputs. `text` is None without a tokenizer; `logprobs` has an entry per token.

    `finish_reason` is "stop", "length", or "abort" after `AsyncLLM.abort`; None while the sequence goes on.
    """

    index: int
    token_ids: list[int]
    text: str | None
    finish_reason: str | None
    logprobs: list[dict[int, Logprob]] | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its outputs.

    `prompt_logprobs` has an entry per prompt token, None for the first; it is None unless requested.
    `request_id` and `finished` are for `AsyncLLM`, which yields several of them for a request.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[SequenceOutput]
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    request_id: str | None = None
    finished: bool = True


class SequenceCollector:
    """Collects the tokens, the text and the log-probabilities of one sequence."""

    def __init__(
        self, params: SamplingParams, tokenizer: Tokenizer | None, *, is_streamed: bool = False
    ) -> None:
        """Decode text as tokens come if `is_streamed` or if there are stop strings, else once at the end."""
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None
        self._params = params
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._text = ""
        self._logprobs: list[dict[int, Logprob]] = []
        self._prompt_parts: list[PromptLogprobs] = []
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        is_decoded_at_once = is_streamed or bool(params.stop)
        self._assembler = make_assembler(params, tokenizer) if is_decoded_at_once else None

    def take(
        self, token_ids: Sequence[int], finish: int, num_cached: int, logprobs: TokenLogprobs | None
    ) -> bool:
        """Add tokens. Return whether they end the sequence, possibly by a stop string.

        Tokens that were computed before a sequence was aborted are ignored.
        """
        if self.finish_reason is not None:
            return False
        self.num_cached_tokens = self.num_cached_tokens or num_cached
        num_kept, assembler = len(token_ids), self._assembler
        if assembler is not None:
            num_before = assembler.num_tokens
            self._text += assembler.feed(token_ids, finish)
            self.finish_reason = assembler.finish_reason
            # Up to the token that completes a stop string.
            num_kept = assembler.num_tokens - num_before
        self._token_ids += token_ids[:num_kept]
        if self._params.logprobs is not None:
            read = _read_logprobs(token_ids, logprobs, self._params.logprobs)
            self._logprobs += islice(read, num_kept)
        if assembler is None and finish:
            assembler = make_assembler(self._params, self._tokenizer)
            self._text = assembler.feed(self._token_ids, finish)
            self.finish_reason = assembler.finish_reason
        return self.finish_reason is not None

    def take_prompt(self, logprobs: PromptLogprobs) -> None:
        """Add log-probabilities of the next prompt tokens."""
        self._prompt_parts.append(logprobs)

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[dict[int, Logprob] | None] | None:
        """Return the entries of a prompt's tokens, or None if the request did not ask for them."""
        num_top = self._params.prompt_logprobs
        if num_top is not None and self._prompt_logprobs is None:
            read = _read_prompt_logprobs(self._prompt_parts, token_ids, num_top)
            self._prompt_logprobs = [None, *read]
            self._prompt_parts = []
        return self._prompt_logprobs

    def output(self, index: int, *, is_delta: bool = False) -> SequenceOutput:
        """Return the output so far, or with `is_delta` only the part since the last call.

        Raises RequestFailedError if the engine could not finish the sequence.
        """
        if self.finish_reason == "error":
            raise RequestFailedError("internal", _FAILED)
        token_ids, text, logprobs = self._token_ids, self._text, self._logprobs
        if is_delta:
            self._token_ids, self._text, self._logprobs = [], "", []
        else:
            token_ids, logprobs = token_ids.copy(), logprobs.copy()
        return SequenceOutput(
            index,
            token_ids,
            None if self._tokenizer is None else text,
            self.finish_reason,
            None if self._params.logprobs is None else logprobs,
        )


def make_assembler(
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    *,
    skips_special: bool = True,
    reasoning: Reasoning | None = None,
) -> Assembler:
    """Return the assembler of one sequence's text; without a tokenizer, its text stays empty.

    Without `skips_special`, the text has special tokens although `params` skips them. `reasoning` are the marks of the
    reasoning, in which stop strings do not count.
    """
    detokenizer = without_text()
    if tokenizer is not None:
        skips_special = skips_special and params.skip_special_tokens
        detokenizer = tokenizer.detokenizer(skip_special_tokens=skips_special)
    marks = None
    if reasoning is not None:
        marks = ReasoningText(reasoning.begin, reasoning.end, reasoning.is_open)
    keeps_stop = params.include_stop_str_in_output
    return Assembler(detokenizer, params.stop, keeps_stop, params.min_tokens, marks)


def make_output(
    prompt: EncodedPrompt,
    prompt_ids: list[int],
    sequences: Sequence[SequenceCollector],
    request_id: str | None = None,
    *,
    is_delta: bool = False,
) -> RequestOutput:
    """Return the outputs of a request so far. Raises RequestFailedError if the engine could not finish one."""
    outputs = [each.output(i, is_delta=is_delta) for i, each in enumerate(sequences)]
    return RequestOutput(
        prompt.text,
        prompt_ids,
        outputs,
        sequences[0].num_cached_tokens,
        sequences[0].prompt_logprobs(prompt_ids),
        request_id,
        all(output.finish_reason is not None for output in outputs),
    )


def _read_logprobs(
    token_ids: Sequence[int], columns: TokenLogprobs | None, num_top: int
) -> Iterator[dict[int, Logprob]]:
    """Yield an entry for each token: its `num_top` alternatives, and the token itself."""
    if columns is None:
        return
    for token_id, value, rank, top in zip(
        token_ids, columns.chosen, columns.ranks, columns.top, strict=True
    ):
        yield _entry(token_id, value, rank, top[:num_top])


def _read_prompt_logprobs(
    parts: Sequence[PromptLogprobs], token_ids: Sequence[int], num_top: int
) -> Iterator[dict[int, Logprob]]:
    """Yield an entry for each token of a prompt after the first."""
    position = 1
    for part in parts:
        values, ranks = part.chosen.tolist(), part.ranks.tolist()
        top_ids = part.top_ids.reshape(len(values), part.width)[:, :num_top].tolist()
        top_values = part.top_values.reshape(len(values), part.width)[:, :num_top].tolist()
        for i, (value, rank) in enumerate(zip(values, ranks, strict=True)):
            top = zip(top_ids[i], top_values[i], strict=True)
            yield _entry(token_ids[position], value, rank, top)
            position += 1


def _entry(
    token_id: int, value: float, rank: int, top: Iterable[tuple[int, float]]
) -> dict[int, Logprob]:
    """Return the alternatives and the token itself."""
    entry = {
        other_id: Logprob(other_value, position)
        for position, (other_id, other_value) in enumerate(top, 1)
    }
    entry[token_id] = Logprob(value, rank)
    return entry
