"""A `DraftDepth` without measurements and a `Drafter` that knows the answers, for tests and benchmarks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tokenspeed_core.api.drafters import DrafterContext, DrafterSpec, Drafts
from tokenspeed_core.api.step import F32, I32
from tokenspeed_core.scheduler.drafts import FinishedStep


class FixedDepth:
    """The same number of draft tokens for every row."""

    is_paused = False
    budget = 0.0  # the loss is not limited
    num_unmeasured = 0  # `finish_step` is called after every step

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts

    def max_drafts(self, num_rows: int) -> int:
        """Return this number."""
        return self._max_drafts

    def follows_prompts(self, num_tokens: int) -> bool:
        """Return whether drafting is not paused."""
        return not self.is_paused

    def max_seconds(self, num_rows: int) -> float:
        """Return no limit."""
        return math.inf

    def spend(self, seconds: float) -> None:
        """Do nothing."""

    def are_worth_waiting(
        self, slots: I32, counts: I32, probabilities: F32 | None, num_rows: int, num_left: int
    ) -> bool:
        """Return whether there are any."""
        return bool(np.count_nonzero(counts))

    def choose(
        self, slots: I32, counts: I32, probabilities: F32 | None, num_rows: int, num_left: int
    ) -> I32:
        """Return the counts, cut where nothing is left."""
        kept: I32 = np.clip(num_left - (np.cumsum(counts) - counts), 0, counts).astype(np.int32)
        return kept

    def pass_steps(self, num_steps: int) -> None:
        """Do nothing."""

    def begin(self, slot: int) -> None:
        """Do nothing."""

    def observe(self, slots: I32, num_drafts: I32, num_accepted: I32) -> None:
        """Do nothing."""

    def finish_step(self, step: FinishedStep) -> None:
        """Do nothing."""


class ForcedDrafter:
    """A `Drafter` that knows the answers, and is right about each token with a fixed probability.

    Its options are `answers`, the path of a JSON list of token ids (each a prompt and its output), which is read again
    for each sequence, and `acceptance`, the probability.
    """

    def __init__(self, context: DrafterContext) -> None:
        self._vocab_size = context.vocab_size
        self._path = Path(context.options["answers"])
        self._acceptance = float(context.options["acceptance"])
        self._random = np.random.default_rng(0)
        # Of each slot, the tokens of its answer, and how many of them it has.
        self._answers: dict[int, I32] = {}
        self._num_tokens: dict[int, int] = {}

    def begin(self, slot: int, token_ids: I32, num_prompt_tokens: int, tenant: str) -> None:
        """Find the answer that starts with these tokens."""
        num = len(token_ids)
        known = [np.asarray(each, np.int32) for each in json.loads(self._path.read_text())]
        found = [each for each in known if np.array_equal(each[:num], token_ids)]
        self._answers[slot] = found[0] if found else np.zeros(0, np.int32)
        self._num_tokens[slot] = num

    def extend(self, slots: I32, counts: I32, token_ids: I32) -> None:
        """Count the tokens."""
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            self._num_tokens[slot] += count

    def propose(self, slots: I32, max_drafts: I32) -> Drafts:
        """Return the next tokens of the answers, of which some are replaced by the next token of the vocabulary."""
        parts = [
            self._answers[slot][self._num_tokens[slot] :][:most]
            for slot, most in zip(slots.tolist(), max_drafts.tolist(), strict=True)
        ]
        counts = np.asarray([len(part) for part in parts], np.int32)
        token_ids = np.concatenate((np.zeros(0, np.int32), *parts))
        is_wrong = self._random.random(len(token_ids)) >= self._acceptance
        wrong = (token_ids + 1) % self._vocab_size
        return Drafts(counts, np.where(is_wrong, wrong, token_ids).astype(np.int32))

    def end(self, slot: int) -> None:
        """Forget the slot."""
        del self._answers[slot], self._num_tokens[slot]


def check_forced(options: Mapping[str, Any]) -> None:
    """Raise ValueError unless the options are valid for a `ForcedDrafter`."""
    if set(options) != {"answers", "acceptance"}:
        raise ValueError("the forced drafter has the options answers and acceptance")


FORCED = DrafterSpec(
    load="tokenspeed_testing.drafts:ForcedDrafter", check="tokenspeed_testing.drafts:check_forced"
)


def install_forced(site: Path) -> None:
    """Write a distribution that registers the drafter `forced` to a folder of `sys.path`."""
    info = site / "forced_drafter-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: forced-drafter\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[tokenspeed.drafters]\nforced = tokenspeed_testing.drafts:FORCED [api1]\n"
    )
