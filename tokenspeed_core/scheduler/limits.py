"""The scheduler's limits: sequences, tokens of a step, and the length of the queue."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Constants of a scheduler. Sizes are in tokens; `chunk_size` -1 turns chunked prefill off."""

    max_num_seqs: int
    max_model_len: int
    chunk_size: int
    max_prefill_tokens: int
    max_queued: int
    vocab_size: int
    seed: int = 0
    max_queued_tokens: int | None = None  # prompt tokens of the waiting sequences
    max_live_per_tenant: int | None = None  # unfinished sequences
    max_drafts: int = 0  # draft tokens of a row
    whole_prompts: bool = False  # a step computes whole prompts, whatever `chunk_size` is

    @property
    def is_chunking(self) -> bool:
        """Whether chunked prefill is on."""
        return self.chunk_size > 0 and not self.whole_prompts

    @property
    def step_flag(self) -> str:
        """The flag that bounds the tokens of the largest step."""
        if self.is_chunking:
            return "--chunked-prefill-size"
        is_longer = self.max_model_len >= self.max_prefill_tokens
        return "--max-model-len" if is_longer else "--max-prefill-tokens"

    @property
    def token_budget(self) -> int:
        """Query tokens per step. Without chunked prefill, a single longer prompt may exceed it."""
        return self.chunk_size if self.is_chunking else self.max_prefill_tokens

    @property
    def max_chunk(self) -> int | None:
        """Upper bound of the query tokens of one sequence in a step; None without chunked prefill."""
        return self.chunk_size if self.is_chunking else None

    @property
    def max_draft_tokens(self) -> int:
        """Upper bound of the draft tokens of a step."""
        return min(self.max_num_seqs * self.max_drafts, self.token_budget)

    @property
    def max_num_tokens(self) -> int:
        """Upper bound of the query tokens of any step."""
        if self.is_chunking:
            return max(self.token_budget, self.max_num_seqs)
        return (
            max(self.token_budget, self.max_model_len) + self.max_num_seqs + self.max_draft_tokens
        )

    @property
    def max_sampled(self) -> int:
        """Upper bound of the query tokens of a step after which a token is chosen."""
        return self.max_num_seqs + self.max_draft_tokens
