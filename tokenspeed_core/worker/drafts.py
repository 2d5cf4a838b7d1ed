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
class DraftTokens:
    """The T query tokens of a step, D of them in decode rows, as int64 columns.

    `slots` [T]. `ids` and `positions` [T]; those of decode rows are the plan's draft tokens, and the place in the row.
    `rows` [D] of the decode rows' tokens. `first` are the indices of the decode rows' first tokens.
    """

    slots: I64
    ids: I64
    positions: I64
    rows: I64
    first: I64

    @classmethod
    def of(cls, plan: StepPlan) -> DraftTokens:
        """Return the columns of a plan."""
        counts, middle = plan.num_query_tokens, plan.num_decodes
        positions = _offsets(counts)
        num = len(positions) - len(plan.token_ids)
        ids = np.zeros(len(positions), np.int64)
        is_draft = positions[:num] > 0
        if plan.draft_token_ids is not None:
            ids[:num][is_draft] = plan.draft_token_ids
        ids[num:] = plan.token_ids
        positions[num:] += np.repeat(plan.num_computed_tokens[middle:], counts[middle:])
        return cls(
            np.repeat(plan.slots, counts).astype(np.int64),
            ids,
            positions,
            np.repeat(np.arange(middle), counts[:middle]),
            np.flatnonzero(~is_draft),
        )


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    """The R query tokens after which a token is chosen, in S rows: all of a decode row, the last of a chunk row.

    `rows` [S] are those rows of the plan, and `num_drafts` [S] their draft tokens. `tokens` [R] are the places of the
    query tokens in the step, and `offsets` [R] in their rows.
    """

    rows: I64
    num_drafts: I64
    tokens: I64
    offsets: I64

    @classmethod
    def of(cls, plan: StepPlan) -> SampledTokens:
        """Return the columns of a plan."""
        rows = np.flatnonzero(plan.wants_logits)
        num_drafts = np.where(rows < plan.num_decodes, plan.num_query_tokens[rows] - 1, 0)
        counts = num_drafts + 1
        offsets = _offsets(counts)
        ends = np.cumsum(plan.num_query_tokens)[rows]
        tokens = np.repeat(ends - counts, counts) + offsets
        return cls(rows, num_drafts.astype(np.int64), tokens, offsets)

    @property
    def first(self) -> I64:
        """The index of each row's first token among the R."""
        first: I64 = np.cumsum(self.num_drafts + 1) - self.num_drafts - 1
        return first


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
    def captured(
        cls, columns: Mapping[str, torch.Tensor], ends: torch.Tensor, max_drafts: int
    ) -> DraftRows:
        """Return the rows of a captured step, padding included. `columns` are those of a StagedLayout."""
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

    def of_step(self, host: SampledTokens) -> DraftRows:
        """Return the rows without padding. All rows of the step sample."""
        num_rows = len(host.rows)
        return DraftRows(
            host,
            self.num_drafts[:num_rows],
            self.first[:num_rows],
            self.slots[:num_rows],
            self.offsets[: len(host.tokens)],
            self.ends[:num_rows],
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
        num_tokens = len(self.host.tokens)
        counts = torch.repeat_interleave(num_new, self.num_drafts + 1, output_size=num_tokens)
        return self.offsets < counts

    def is_kept(self, num_new: I32) -> Bool:
        """Return the mask of `is_new`, computed on the host, bool [R]."""
        kept: Bool = self.host.offsets < np.repeat(num_new, self.host.num_drafts + 1)
        return kept

    def drafts_before(self, rows: I64) -> tuple[I64, I64]:
        """Return the draft tokens that precede the new token of some of the R rows.

        The first result indexes `rows`, the second the query tokens of the step.
        """
        counts = self.host.offsets[rows]
        first = self.host.tokens[rows] - counts + 1
        return (
            np.repeat(np.arange(len(rows)), counts),
            np.repeat(first, counts) + _offsets(counts),
        )


def _offsets(counts: I32 | I64) -> I64:
    """Return 0, 1, … within each row of `counts` tokens."""
    ends = np.cumsum(counts, dtype=np.int64)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
