"""A `DraftDepth` without measurements, for tests."""

from __future__ import annotations

import numpy as np

from tokenspeed_core.api.step import F32, I32


class FixedDepth:
    """The same number of draft tokens for every row."""

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts

    def max_drafts(self, slots: I32) -> I32:
        """Return this number for each row."""
        return np.full(len(slots), self._max_drafts, np.int32)

    def choose(
        self, slots: I32, counts: I32, probabilities: F32 | None, num_rows: int, num_left: int
    ) -> I32:
        """Return the counts, cut where nothing is left."""
        kept: I32 = np.clip(num_left - (np.cumsum(counts) - counts), 0, counts).astype(np.int32)
        return kept

    def begin(self, slot: int) -> None:
        """Do nothing."""

    def observe(self, slots: I32, num_drafts: I32, num_accepted: I32) -> None:
        """Do nothing."""

    def finish_step(
        self, num_rows: int, num_tokens: int, num_chunk_tokens: int, seconds: float
    ) -> None:
        """Do nothing."""
