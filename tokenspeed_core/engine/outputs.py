"""The results of `LLM.generate`, and how the engine's deltas become them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tokenspeed_core.api.sampling import FinishReason, SamplingParams
from tokenspeed_core.engine.messages import SequenceDelta
from tokenspeed_core.errors import TokenSpeedError
from tokenspeed_core.text import Assembler, Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability and rank (1: the most probable; 0: not computed)."""

    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """One of the `n` outputs. `text` is None without a tokenizer; `logprobs` has an entry per token."""

    index: int
    token_ids: list[int]
    text: str | None
    finish_reason: str | None
    logprobs: list[dict[int, Logprob]] | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its outputs."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[SequenceOutput]
    num_cached_tokens: int


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
        self._text = ""
        # Without stop strings, the text is decoded once, at the end.
        self._assembler: Assembler | None = None
        if params.stop:
            assert tokenizer is not None
            self._assembler = _make_assembler(params, tokenizer)

    def take(self, delta: SequenceDelta) -> bool:
        """Add a delta. Return whether the engine must abort the sequence, since a stop string ended it."""
        if self._finish:
            return False  # computed before the engine aborted the sequence
        self._token_ids += delta.token_ids
        self._logprobs += _read_logprobs(delta, self._params.logprobs or 0)
        self._finish = FinishReason(delta.finish)
        self.num_cached_tokens = self.num_cached_tokens or delta.num_cached_tokens
        if self._assembler is not None:
            self._text += self._assembler.feed(delta.token_ids, delta.finish)
            if self._assembler.finish_reason == "stop" and not delta.finish:
                self._finish = FinishReason.STOP
                return True
        elif delta.finish and self._tokenizer is not None:
            assembler = _make_assembler(self._params, self._tokenizer)
            self._text = assembler.feed(self._token_ids, delta.finish)
        return False

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


def _make_assembler(params: SamplingParams, tokenizer: Tokenizer) -> Assembler:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens)
    return Assembler(detokenizer, params.stop, params.include_stop_str_in_output)


def _read_logprobs(delta: SequenceDelta, num_top: int) -> Iterator[dict[int, Logprob]]:
    """Yield an entry for each token: its `num_top` alternatives, and the token itself."""
    columns = delta.logprobs
    if columns is None:
        return
    for token_id, value, rank, top in zip(
        delta.token_ids, columns.chosen, columns.ranks, columns.top, strict=True
    ):
        entry = {}
        for position, (other_id, other_value) in enumerate(top[:num_top], 1):
            entry[other_id] = Logprob(other_value, position)
        entry[token_id] = Logprob(value, rank)
        yield entry
