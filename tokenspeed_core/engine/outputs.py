"""What `LLM.generate` returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability, and its rank among all (1: the likeliest; 0: not asked of this one)."""

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
    """A prompt and what was generated from it."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[SequenceOutput]
    num_cached_tokens: int
