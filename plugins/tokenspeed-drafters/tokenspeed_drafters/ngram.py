"""Prompt lookup: the continuation of the newest earlier occurrence of a sequence's last tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tokenspeed_core.api import DrafterContext, Drafts
from tokenspeed_drafters.arrays import I32
from tokenspeed_drafters.options import take_integers

MAX_NGRAM = 64  # tokens
_DEFAULTS = {"prompt_lookup_max": 4, "prompt_lookup_min": 1}


def read_options(options: Mapping[str, Any]) -> tuple[int, int]:
    """Return the longest and the shortest n-gram, in tokens. Raises ValueError."""
    found = take_integers(options, _DEFAULTS, 1, MAX_NGRAM)
    longest, shortest = found["prompt_lookup_max"], found["prompt_lookup_min"]
    if "prompt_lookup_min" not in options:
        shortest = min(shortest, longest)
    if shortest > longest:
        raise ValueError(
            f"prompt_lookup_min is {shortest}, expected at most prompt_lookup_max ({longest})"
        )
    return longest, shortest


def check(options: Mapping[str, Any]) -> None:
    """Raise ValueError for wrong options."""
    read_options(options)


def find_ngram(tokens: I32, longest: int, shortest: int) -> int:
    """Return the position after the newest earlier occurrence of the longest suffix, or 0 if there is none.

    Suffixes have `shortest` to `longest` tokens. The time is linear in the tokens, at about 0.2 ns for each.
    """
    num_tokens = len(tokens)
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    length = 1
    while length < longest and len(ends):
        longer = ends[ends >= length]
        longer = longer[tokens[longer - length] == tokens[num_tokens - 1 - length]]
        if not len(longer):
            break
        ends = longer
        length += 1
    if not len(ends) or length < shortest:
        return 0
    return int(ends[-1]) + 1


class NgramDrafter:
    """Keeps the tokens of each running sequence, and nothing else."""

    def __init__(self, context: DrafterContext) -> None:
        """Start without sequences. Raises ValueError for wrong options."""
        self._longest, self._shortest = read_options(context.options)
        # Not initialized: memory is committed only for tokens that are written.
        self._tokens = np.empty((context.num_slots, context.max_model_len + 1), np.int32)
        self._num_tokens = [0] * context.num_slots

    def begin(self, slot: int, token_ids: I32, num_prompt_tokens: int, tenant: str) -> None:
        """Start a sequence."""
        self._tokens[slot, : len(token_ids)] = token_ids
        self._num_tokens[slot] = len(token_ids)

    def extend(self, slots: I32, counts: I32, token_ids: I32) -> None:
        """Add generated tokens."""
        start = 0
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            length = self._num_tokens[slot]
            self._tokens[slot, length : length + count] = token_ids[start : start + count]
            self._num_tokens[slot] = length + count
            start += count

    def propose(self, slots: I32, max_drafts: I32) -> Drafts:
        """Return the tokens that followed the newest occurrence of each sequence's last tokens."""
        counts: list[int] = []
        parts: list[I32] = []
        for slot, limit in zip(slots.tolist(), max_drafts.tolist(), strict=True):
            tokens = self._tokens[slot, : self._num_tokens[slot]]
            position = find_ngram(tokens, self._longest, self._shortest)
            part = tokens[position : position + limit] if position else tokens[:0]
            counts.append(len(part))
            parts.append(part)
        return Drafts(np.asarray(counts, np.int32), np.concatenate(parts))

    def end(self, slot: int) -> None:
        """Forget a sequence."""
        self._num_tokens[slot] = 0
