"""Finds the padding tokens of captured steps that several engines execute together."""

from __future__ import annotations

import torch

from tokenspeed_core.worker.staged import BucketSize


class SharedPadding:
    """Finds the padding tokens of all engines in a step of one bucket.

    Without it, experts would compute the padding tokens of all engines.
    """

    def __init__(self, size: BucketSize, counts: torch.Tensor) -> None:
        """`counts` int32 [2 x engines] are read in each step: the tokens of each engine's decodes and of its chunks."""
        num_engines, num_decodes = len(counts) // 2, size.num_decode_tokens
        token = torch.arange(size.num_tokens, dtype=torch.int32, device=counts.device)
        is_chunk = token >= num_decodes
        engine = torch.arange(num_engines, dtype=torch.int32, device=counts.device)
        self._counts = counts
        self._parts = (2 * engine[:, None] + is_chunk).flatten()
        self._places = (token - num_decodes * is_chunk).repeat(num_engines)

    def find(self) -> torch.Tensor:
        """Return whether each token is padding, bool [engines x tokens]."""
        return self._counts.index_select(0, self._parts) <= self._places
