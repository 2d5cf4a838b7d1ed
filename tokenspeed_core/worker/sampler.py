"""Chooses tokens from logits: adjustments, the selected kernel, log-probabilities, and the slots' next state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tokenspeed_core.api.logits_processors import LogitsProcessor
from tokenspeed_core.api.step import I32, I64, Bool, LateInputs, SlotInits, StepLogprobs
from tokenspeed_core.worker.adjust import Biases, EndIds, TokenCounts, penalize
from tokenspeed_core.worker.drafts import DraftRows
from tokenspeed_core.worker.logits_processors import LogitsProcessors
from tokenspeed_core.worker.masks import Masks
from tokenspeed_core.worker.slots import DRAWS, SPECIAL, SlotFlags, SlotState
from tokenspeed_core.worker.transfer import HostDeviceTransfer

Kernel = Callable[..., Any]


@dataclass(frozen=True, slots=True, eq=False)
class RunnerKernels:
    """The kernels that the worker itself calls.

    `greedy`, `note` (the op note_tokens) and `mask` (mask_logits) are by the dtype of logits. `gather` (gather_tokens)
    and `verify` (verify_drafts) are of steps with draft tokens.
    """

    sample: Kernel
    greedy: Mapping[torch.dtype, Kernel]
    note: Mapping[torch.dtype, Kernel]
    mask: Mapping[torch.dtype, Kernel]
    advance: Kernel
    map: Kernel
    gather: Kernel
    verify: Kernel


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """The R rows that sample: their indices in the plan, their slots, and the positions of their new tokens.

    `device_slots` and `new_positions` are int64 [R] on the device. `last` int64 [R] are the places of the rows' last
    tokens among the step's `token_ids` int64 [T]; None if they are the first R.

    With `drafts`, a plan row occurs once for each query token after which a token is chosen, and `last` are the places
    of these query tokens.
    """

    plan_rows: I32
    slots: I32
    device_slots: torch.Tensor
    new_positions: torch.Tensor
    token_ids: torch.Tensor
    last: torch.Tensor | None
    drafts: DraftRows | None = None

    def at(self, places: torch.Tensor) -> SamplingRows:
        """Return rows with the device tensors of the rows at `places`, int64 [R]."""
        last = places if self.last is None else self.last[places]
        slots, positions = self.device_slots[places], self.new_positions[places]
        return replace(self, device_slots=slots, new_positions=positions, last=last)

    def last_tokens(self) -> torch.Tensor:
        """Return the tokens that the model has just read, int64 [R]."""
        return self.token_ids[: len(self.slots)] if self.last is None else self.token_ids[self.last]


@dataclass(frozen=True, slots=True, eq=False)
class RankedTokens:
    """Log-probabilities of R tokens on the device: `chosen`, `ranks` [R]; `top_ids`, `top_values` [R, width]."""

    chosen: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_values: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the tensors to copy to the host."""
        return self.chosen, self.ranks, self.top_ids, self.top_values


@dataclass(frozen=True, slots=True, eq=False)
class RawLogprobs(RankedTokens):
    """The log-probabilities of sampled tokens, of the rows `rows` of the plan and their sampling rows `places`."""

    rows: I32
    places: I64

    def result(
        self, arrays: Sequence[np.ndarray[Any, Any]], is_kept: Bool | None = None
    ) -> StepLogprobs:
        """Return the result's columns from the host copies of `tensors`, of the sampling rows that are kept."""
        rows = self.rows
        if is_kept is not None:
            arrays, rows = [each[is_kept[self.places]] for each in arrays], np.unique(rows)
        chosen, ranks, top_ids, top_values = arrays
        width = top_ids.shape[1]
        return StepLogprobs(rows, width, chosen, ranks, top_ids.reshape(-1), top_values.reshape(-1))


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """Sampled tokens: `ids` int32 [R], -1 for a row without a finite logit.

    With drafts, `num_new` int32 is the number of new tokens of each plan row that samples.
    """

    ids: torch.Tensor
    logprobs: RawLogprobs | None
    num_new: torch.Tensor | None


class Sampler:
    """Chooses tokens for any mix of rows; the parameters of one row do not affect another.

    Log-probabilities are the log-softmax, in float32, of the model's own logits: before penalties, biases,
    masks and temperature.
    """

    def __init__(
        self,
        state: SlotState,
        flags: SlotFlags,
        vocab_size: int,
        kernels: RunnerKernels,
        transfer: HostDeviceTransfer,
        masks: Masks,
        processors: Mapping[str, LogitsProcessor],
    ) -> None:
        """Bind the kernels. `processors` are the logits processors that sequences may name."""
        self._state = state
        self._flags = flags
        self._kernels = kernels
        self._transfer = transfer
        self._masks = masks
        self._counts = TokenCounts(state.layout.num_slots, vocab_size, state.words.device)
        self._biases = Biases(state.layout.num_slots, state.words.device)
        self._end_ids = EndIds(state.layout.num_slots, state.words.device)
        self._processors = LogitsProcessors(processors)

    def begin(self, inits: SlotInits) -> None:
        """Store the sampling parameters that are not columns of the slots' state."""
        self._flags.update(inits)
        if not self._flags.asked(inits.slots) & SPECIAL:
            return
        penalized = np.flatnonzero(self._flags.penalized[inits.slots]).astype(np.int32)
        biased = np.flatnonzero(self._flags.biased[inits.slots]).astype(np.int32)
        if len(penalized):
            self._counts.begin(inits, penalized, self._transfer)
        if len(biased):
            self._biases.begin(inits, biased, self._transfer)
        endless = np.flatnonzero(self._flags.num_endless[inits.slots]).astype(np.int32)
        if len(endless):
            self._end_ids.begin(inits, endless, self._transfer)
        processed = np.flatnonzero(self._flags.processed[inits.slots]).astype(np.int32)
        if len(processed):
            self._processors.begin(inits, processed)

    def __call__(
        self, logits: torch.Tensor, rows: SamplingRows, late: LateInputs | None
    ) -> Sampled:
        """Choose a token for each row of logits [R, V], and make it the last token of its slot.

        May write into `logits`.
        """
        flags, drafts = self._flags, rows.drafts
        asked = flags.asked(rows.slots)
        if not asked & SPECIAL:
            if late is not None:
                self._mask(logits, rows, late)
            ids = self._choose(logits, rows, asked)
            return Sampled(ids, None, self._verify(rows, ids))
        wanted = flags.num_logprobs[rows.slots]
        asking = np.flatnonzero(wanted >= 0)
        penalized = np.flatnonzero(flags.penalized[rows.slots])
        biased = np.flatnonzero(flags.biased[rows.slots])
        endless = np.flatnonzero(flags.num_endless[rows.slots])
        processed = np.flatnonzero(flags.processed[rows.slots])
        asking_rows, penalized_rows, biased_rows, endless_rows = self._transfer.send(
            (asking, penalized, biased, endless)
        )
        raw = torch.log_softmax(logits[asking_rows].float(), dim=-1) if len(asking) else None
        if any(map(len, (penalized, biased, endless, processed))):
            logits = logits.float()
        if len(penalized):
            counts = self._counts.of(rows.device_slots[penalized_rows])
            if drafts is not None:
                self._count_drafts(counts, rows, drafts, penalized)
            penalize(logits, penalized_rows, rows.device_slots[penalized_rows], counts, self._state)
        if len(biased):
            self._biases.add(logits, biased_rows, rows.device_slots[biased_rows])
        if len(processed):
            # A captured step has replaced the slots' last tokens by its greedy ones.
            self._processors.apply(
                logits, processed, rows.slots, rows.last_tokens(), self._transfer
            )
        if len(endless):
            num_before = None if drafts is None else drafts.offsets[endless_rows]
            self._end_ids.forbid(logits, endless_rows, rows.device_slots[endless_rows], num_before)
            flags.note_sampled(rows.slots)
        if late is not None:
            self._mask(logits, rows, late)
        ids = self._choose(logits, rows, asked)
        num_new = self._verify(rows, ids)
        if len(penalized) or len(endless):
            is_new = torch.ones_like(ids)
            if drafts is not None and num_new is not None:
                is_new = drafts.is_new(num_new).to(torch.int32)
            if len(penalized):
                counted = ids[penalized_rows].to(torch.int64).clamp_(min=0)
                self._counts.add(rows.device_slots[penalized_rows], counted, is_new[penalized_rows])
            if len(endless):
                self._end_ids.note(rows.device_slots[endless_rows], is_new[endless_rows])
        if raw is None:
            return Sampled(ids, None, num_new)
        ranked = rank_tokens(raw, ids[asking_rows], int(wanted.max()))
        plan_rows = rows.plan_rows[asking].astype(np.int32)
        return Sampled(ids, RawLogprobs(*ranked.tensors(), plan_rows, asking), num_new)

    def _count_drafts(
        self, counts: torch.Tensor, rows: SamplingRows, drafts: DraftRows, penalized: I64
    ) -> None:
        """Add to the counts [P, V] of penalized rows the draft tokens that precede each of their new tokens."""
        index, tokens = self._transfer.send(drafts.drafts_before(penalized))
        read = rows.token_ids[tokens]
        ones = torch.ones_like(read, dtype=torch.int32)
        counts.index_put_((index, read), ones, accumulate=True)

    def _verify(self, rows: SamplingRows, ids: torch.Tensor) -> torch.Tensor | None:
        """Verify the draft tokens of the rows. Returns the number of new tokens of each row of the plan."""
        if rows.drafts is None:
            return None
        assert rows.last is not None, "steps with draft tokens list the sampled rows"
        num_new = torch.empty(len(rows.drafts.slots), dtype=torch.int32, device=ids.device)
        verify = self._kernels.verify
        rows.drafts.verify(verify, rows.token_ids, rows.last, ids, self._state, num_new)
        return num_new

    def _choose(self, logits: torch.Tensor, rows: SamplingRows, asked: int) -> torch.Tensor:
        """Run a kernel and note its tokens; ids int32 [R]."""
        if asked & DRAWS:
            chosen = draw(
                self._state, self._kernels.sample, logits, rows.device_slots, rows.new_positions
            )
        else:
            chosen = self._kernels.greedy[logits.dtype](logits)
        ids = torch.empty(len(chosen), dtype=torch.int32, device=chosen.device)
        self._kernels.note[logits.dtype](
            logits, chosen, rows.device_slots, self._state.last_token, ids
        )
        return ids

    def mask(self, logits: torch.Tensor, places: I64, late: LateInputs) -> None:
        """Forbid tokens in place; `places` are the rows of logits [S, V] that `late` masks, in its order."""
        device_places, words = self._masks.upload(places, late.mask.reshape(len(late.rows), -1))
        self._kernels.mask[logits.dtype](logits, device_places, words)
        self._masks.release()

    def _mask(self, logits: torch.Tensor, rows: SamplingRows, late: LateInputs) -> None:
        self.mask(logits, places_of(rows, late), late)


def places_of(rows: SamplingRows, late: LateInputs) -> I64:
    """Return the places of the masked rows among the sampling rows."""
    places = np.searchsorted(rows.plan_rows, late.rows)
    if rows.drafts is not None:
        places += np.arange(len(places)) - np.searchsorted(late.rows, late.rows)
    return places.astype(np.int64)


def draw(
    state: SlotState,
    sample: Kernel,
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Run the op `sample` with the slots' parameters; returns int64 [R]."""
    chosen: torch.Tensor = sample(
        logits.float(),
        state.temperature[slots],
        state.top_k[slots],
        state.top_p[slots],
        state.min_p[slots],
        state.seed[slots],
        positions,
    )
    return chosen


def rank_tokens(raw: torch.Tensor, ids: torch.Tensor, width: int) -> RankedTokens:
    """Return the values and ranks of tokens `ids` [R], and the `width` top tokens of each row, at most V.

    `raw` float32 [R, V] are log-probabilities. Ids and ranks are int32.
    """
    chosen = raw.gather(1, ids.to(torch.int64).clamp_(min=0).unsqueeze(1))
    ranks = (raw > chosen).sum(dim=-1, dtype=torch.int32) + 1
    top_values, top_ids = raw.topk(min(width, raw.shape[1]), dim=-1)
    return RankedTokens(chosen.squeeze(1), ranks, top_ids.to(torch.int32), top_values)
