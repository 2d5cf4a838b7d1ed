"""What bounds a step and a sequence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The scheduler's constants. Sizes are in tokens; `chunk_size` -1 turns chunking off."""

    max_num_seqs: int
    max_model_len: int
    chunk_size: int
    max_prefill_tokens: int
    max_queued: int
    vocab_size: int
    seed: int = 0

    @property
    def is_chunking(self) -> bool:
        """Whether prompts are cut."""
        return self.chunk_size > 0

    @property
    def token_budget(self) -> int:
        """Query tokens that a step may have (a single prompt may exceed it when chunking is off)."""
        return self.chunk_size if self.is_chunking else self.max_prefill_tokens

    @property
    def max_num_tokens(self) -> int:
        """The most query tokens that any step can have."""
        whole = (
            self.token_budget if self.is_chunking else max(self.token_budget, self.max_model_len)
        )
        return max(whole, self.max_num_seqs) if self.is_chunking else whole + self.max_num_seqs
