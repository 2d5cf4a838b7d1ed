"""The results of requests, and how the engine's deltas become them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tokenspeed_core.api.sampling import FinishReason, SamplingParams
from tokenspeed_core.engine.messages import PromptLogprobs, SequenceDelta, TokenLogprobs
from tokenspeed_core.errors import TokenSpeedError
from tokenspeed_core.text import Assembler, Tokenizer
from tokenspeed_core.text.detokenizer import without_text


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
    """Collects the tokens and the text of one sequence."""

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        """`params.stop` needs a tokenizer."""
        self.num_cached_tokens = 0
        self._params = params
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._finish = FinishReason.NOT
        self._logprobs: list[dict[int, Logprob]] = []
        self._prompts: list[PromptLogprobs] = []
        self._text = ""
        # Without stop strings, the text is decoded once, at the end.
        self._assembler: Assembler | None = None
        if params.stop:
            assert tokenizer is not None
            self._assembler = make_assembler(params, tokenizer)

    def take(self, delta: SequenceDelta) -> bool:
        """Add a delta. Return whether the engine must abort the sequence, since a stop string ended it."""
        if self._finish:
            return False  # computed before the engine aborted the sequence
        self._token_ids += delta.token_ids
        self._logprobs += read_logprobs(delta.token_ids, delta.logprobs, self._params.logprobs or 0)
        self._finish = FinishReason(delta.finish)
        self.num_cached_tokens = self.num_cached_tokens or delta.num_cached_tokens
        if self._assembler is not None:
            self._text += self._assembler.feed(delta.token_ids, delta.finish)
            if self._assembler.finish_reason == "stop" and not delta.finish:
                self._finish = FinishReason.STOP
                return True
        elif delta.finish and self._tokenizer is not None:
            assembler = make_assembler(self._params, self._tokenizer)
            self._text = assembler.feed(self._token_ids, delta.finish)
        return False

    def take_prompt(self, logprobs: PromptLogprobs) -> None:
        """Add log-probabilities of the next prompt tokens."""
        self._prompts.append(logprobs)

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[dict[int, Logprob] | None] | None:
        """Return the entries of a prompt's tokens. None unless the request wants them."""
        num_top = self._params.prompt_logprobs
        if num_top is None:
            return None
        return [None, *read_prompt_logprobs(self._prompts, token_ids, num_top)]

    def output(self, index: int) -> SequenceOutput:
        """Return the result. Raises TokenSpeedError if the engine could not finish the sequence."""
        if self._finish is FinishReason.ERROR:
            raise TokenSpeedError(
                "the engine could not finish a sequence: its step failed on the device, or the model "
                "returned no finite logits; see the log"
            )
        return SequenceOutput(
            index,
            self._token_ids,
            None if self._tokenizer is None else self._text,
            self._finish.name.lower(),
            None if self._params.logprobs is None else self._logprobs,
        )


def make_assembler(params: SamplingParams, tokenizer: Tokenizer | None) -> Assembler:
    """Return the assembler of one sequence's text; without a tokenizer, its text stays empty."""
    detokenizer = (
        without_text()
        if tokenizer is None
        else tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens)
    )
    return Assembler(detokenizer, params.stop, params.include_stop_str_in_output, params.min_tokens)


def read_logprobs(
    token_ids: Sequence[int], columns: TokenLogprobs | None, num_top: int
) -> Iterator[dict[int, Logprob]]:
    """Yield an entry for each token: its `num_top` alternatives, and the token itself."""
    if columns is None:
        return
    for token_id, value, rank, top in zip(
        token_ids, columns.chosen, columns.ranks, columns.top, strict=True
    ):
        yield _entry(token_id, value, rank, top[:num_top])


def read_prompt_logprobs(
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
