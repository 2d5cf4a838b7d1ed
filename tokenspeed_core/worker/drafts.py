"""Steps with draft tokens: their inputs, and the verification after the tokens were chosen.

Each query token of a decode row gets a row of logits, so that the next token can be chosen there. `StepPlan` says why
the outputs equal those without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from tokenspeed_core.api.step import I32, I64, Bool, StepPlan
from tokenspeed_core.worker.slots import SlotState


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    """The R query tokens after which a token is chosen, in S rows: all of a decode row, the last of a chunk row.

    `rows` [S] are those rows of the plan, and `num_drafts` [S] their draft tokens. `offsets` [R] are the places of the
    query tokens in their rows, and `row_of` [R] the indices of their rows in `rows`.
    """

    rows: I64
    num_drafts: I64
    offsets: I64
    row_of: I64

    @classmethod
    def of(cls, plan: StepPlan) -> SampledTokens:
        """Return the columns of a plan."""
        rows, middle = plan.wants_logits.nonzero()[0], plan.num_decodes
        num_drafts = np.zeros(len(rows), np.int64)
        np.subtract(plan.num_query_tokens[:middle], 1, out=num_drafts[:middle])
        counts = num_drafts + 1
        return cls(rows, num_drafts, _offsets(counts), np.arange(len(rows)).repeat(counts))


@dataclass(frozen=True, slots=True, eq=False)
class DraftRows:
    """Sampled tokens with their columns on the device.

    `num_drafts`, `first` and `slots` int64 [S]; `offsets` int64 [R]; `ends` int32 [S] are the slots' lengths after the
    step if all draft tokens are accepted. No row has more than `max_drafts` of them.
    """

    host: SampledTokens
    num_drafts: torch.Tensor
    first: torch.Tensor
    slots: torch.Tensor
    offsets: torch.Tensor
    ends: torch.Tensor
    max_drafts: int

    @classmethod
    def staged(
        cls, columns: Mapping[str, torch.Tensor], ends: torch.Tensor, max_drafts: int
    ) -> DraftRows:
        """Return all rows of a step, padding included. `columns` are those of its StagedLayout."""
        nothing = np.zeros(0, np.int64)
        return cls(
            SampledTokens(nothing, nothing, nothing, nothing),
            columns["num_drafts"],
            columns["first"],
            columns["slots"],
            columns["offsets"],
            ends,
            max_drafts,
        )

    def of_step(self, host: SampledTokens, rows: torch.Tensor | None = None) -> DraftRows:
        """Return the rows of a step that sample: `rows` int64 [S], or the first S."""
        num_rows = len(host.rows)
        return DraftRows(
            host,
            # Chunks, which may not sample, have no draft tokens and one row of logits each.
            self.num_drafts[:num_rows],
            self.first[:num_rows],
            self.slots[:num_rows] if rows is None else self.slots[rows],
            self.offsets[: len(host.offsets)],
            self.ends[:num_rows] if rows is None else self.ends[rows],
            self.max_drafts,
        )

    def verify(
        self,
        kernel: Callable[..., None],
        token_ids: torch.Tensor,
        tokens: torch.Tensor,
        ids: torch.Tensor,
        state: SlotState,
        num_new: torch.Tensor,
    ) -> None:
        """Accept draft tokens up to the first that differs from the token chosen there, ids int32 [R].

        `kernel` is the op verify_drafts. `token_ids` int64 [T] are the step's query tokens, `tokens` int64 [R] the
        places of those that the R rows of logits follow. Writes the slots' last tokens and lengths, and the number of
        new tokens of each row, `num_new` int32 [S]. It may be called again for other `ids`.
        """
        kernel(
            ids,
            token_ids,
            tokens,
            self.first,
            self.num_drafts,
            self.slots,
            self.ends,
            state.last_token,
            state.seq_len,
            num_new,
            self.max_drafts,
        )

    def is_new(self, num_new: torch.Tensor) -> torch.Tensor:
        """Return for each of the R tokens whether it is one of its row's new tokens, bool [R]."""
        num_tokens = len(self.host.offsets)
        counts = torch.repeat_interleave(num_new, self.num_drafts + 1, output_size=num_tokens)
        return self.offsets < counts

    def is_kept(self, num_new: I32) -> Bool:
        """Return the mask of `is_new`, computed on the host, bool [R]."""
        kept: Bool = self.host.offsets < num_new[self.host.row_of]
        return kept

    def drafts_before(self, rows: I64) -> tuple[I64, I64]:
        """Return the draft tokens that precede the new token of some of the R rows.

        The first result indexes `rows`, the second the query tokens of the step.
        """
        counts = self.host.offsets[rows]
        first = rows - counts + 1  # tokens of decodes come first, as their rows of logits do
        return (
            np.repeat(np.arange(len(rows)), counts),
            np.repeat(first, counts) + _offsets(counts),
        )


def _offsets(counts: I32 | I64) -> I64:
    """Return 0, 1, … within each row of `counts` tokens."""
    ends = counts.cumsum(dtype=np.int64)
    first: I64 = (ends - counts).repeat(counts)
    return np.arange(len(first)) - first
