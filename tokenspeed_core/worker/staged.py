"""The host's upload for a step: one buffer, laid out for the size of the step or of its bucket.

Rows and tokens are in the order `[decodes, padding, chunks, padding]`; padding names the padding slot. A decode has one
token, or with draft tokens several, which follow each other. Every token of a decode is sampled, and the last one of a
chunk: `[tokens of decodes, padding, chunks, padding]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from tokenspeed_core.api.step import I32, I64, StepPlan
from tokenspeed_core.worker.slots import SlotLayout

_MAX_FILLED = 64  # buffers that a layout caches
_NONE = np.zeros(0, np.int32)
_NO_ROWS = StepPlan(-1, 0, _NONE, _NONE, _NONE, _NONE.astype(bool), _NONE, _NONE, (), None)


@dataclass(frozen=True, slots=True)
class BucketSize:
    """The decode rows, chunk rows, and tokens of all chunks that a step has, or that a bucket holds at most.

    With `no_shared_prefix`, its decodes are short and share no prefix, so attention skips the search for one.
    `num_draft_tokens` are those of all decode rows together. With `is_followed`, it has chunks, and a draft model runs
    after the step.
    """

    num_decodes: int
    num_chunks: int
    num_chunk_tokens: int
    no_shared_prefix: bool = False
    num_draft_tokens: int = 0
    is_followed: bool = False

    @property
    def num_rows(self) -> int:
        """Rows, padding included."""
        return self.num_decodes + self.num_chunks

    @property
    def num_tokens(self) -> int:
        """Query tokens, padding included."""
        return self.num_decodes + self.num_draft_tokens + self.num_chunk_tokens

    @property
    def num_decode_tokens(self) -> int:
        """Query tokens of decodes, padding included."""
        return self.num_decodes + self.num_draft_tokens

    @property
    def num_sampled(self) -> int:
        """Rows of logits, padding included: one of each token of a decode, and one of each chunk."""
        return self.num_decodes + self.num_draft_tokens + self.num_chunks


class StagedLayout:
    """The place of each column in the buffer: int64 columns first, then int32 columns.

    int64: `slots` [rows]; `words` of the slots' state to change. int32: `values` of the words; `advance` [rows], by which
    lengths grow. With chunks or draft tokens, int64: `token_slots` [tokens].

    With chunks, int64: `positions` and `ids` [tokens] (of chunks only: those of decodes come from the state), and `last`
    [sampled], the token that each row of logits follows. int32: `chunk_start` [chunks + 1], from the first chunk token.

    With draft tokens, int64: `num_drafts` and `first` [rows], the draft tokens of each row, and its first row of logits;
    `token_words` [tokens of decodes], where the state has the token; `until_end` [tokens of decodes], by which the
    position precedes the row's new length; and `offsets` [sampled] in the row. int32: `decode_start` [decodes + 1].

    If a draft model may run after the step, int64: `capacity` [rows], that of `NextDrafts`, 0 for rows that do not sample; and with
    chunks `follows` [tokens], the token after each, or -1 - row for the token that is chosen for a row.

    If several engines execute the step together, int32: `counts` [2 x engines], the tokens of each one's decodes and
    those of its chunks.
    """

    def __init__(
        self,
        size: BucketSize,
        num_words: int,
        *,
        has_draft_model: bool = False,
        num_engines: int = 1,
    ) -> None:
        """Lay out a size in which at most `num_words` words of the state change."""
        self.size = size
        self.num_words = num_words
        self.has_draft_model = has_draft_model
        num_rows, num_tokens = size.num_rows, size.num_tokens
        wide = {"slots": num_rows, "words": num_words}
        narrow = {"values": num_words, "advance": num_rows}
        if size.num_chunks or size.num_draft_tokens:
            wide["token_slots"] = num_tokens
        if size.num_chunks:
            wide["positions"] = wide["ids"] = num_tokens
            wide["last"] = size.num_sampled
            narrow["chunk_start"] = size.num_chunks + 1
        if size.num_draft_tokens:
            wide["num_drafts"] = wide["first"] = num_rows
            wide["token_words"] = wide["until_end"] = size.num_decode_tokens
            wide["offsets"] = size.num_sampled
            narrow["decode_start"] = size.num_decodes + 1
        if has_draft_model:
            wide |= {"capacity": num_rows, "follows": num_tokens * (size.num_chunks > 0)}
        if num_engines > 1:
            narrow["counts"] = 2 * num_engines
        self.wide, self.middle = _place(wide)
        self.narrow, length = _place(narrow)
        self.num_int64 = self.middle + -(-length // 2)
        self._filled: dict[bytes, I64] = {}  # buffers of earlier plans, by their keys

    def columns(self, staged: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return views of the columns in an uploaded buffer, int64 [num_int64]."""
        narrow = staged[self.middle :].view(torch.int32)
        columns = {name: staged[place] for name, place in self.wide.items()}
        columns |= {name: narrow[place] for name, place in self.narrow.items()}
        return columns

    def fill(
        self,
        host: I64,
        plan: StepPlan,
        words: I64,
        values: I32,
        state: SlotLayout,
        counts: I32 | None = None,
        key: bytes | None = None,
    ) -> None:
        """Write a plan, the words of the state that it changes, and the `counts` of all engines.

        Plans with the same `key` are equal, except for these words.
        """
        filled = None if key is None else self._filled.get(key)
        if filled is not None:
            host[:] = filled
        else:
            self._fill_rows(host, plan, state, counts)
            if key is not None:
                if len(self._filled) >= _MAX_FILLED:
                    self._filled.clear()
                self._filled[key] = host.copy()
        num_words = len(words)
        all_words = host[self.wide["words"]]
        all_values = host[self.middle :].view(np.int32)[self.narrow["values"]]
        all_words[:num_words], all_words[num_words:] = words, state.padding[1]
        all_values[:num_words], all_values[num_words:] = values, 0

    def _fill_rows(self, host: I64, plan: StepPlan, state: SlotLayout, counts: I32 | None) -> None:
        size, middle, padding = self.size, plan.num_decodes, state.padding
        narrow = host[self.middle :].view(np.int32)
        narrow[:] = 0
        slots, advance = host[self.wide["slots"]], narrow[self.narrow["advance"]]
        slots[:middle], slots[middle:] = plan.slots[:middle], padding[0]
        advance[:middle] = plan.num_query_tokens[:middle]
        if size.num_chunks:
            chunks = slice(size.num_decodes, size.num_decodes + plan.num_rows - middle)
            slots[chunks], advance[chunks] = plan.slots[middle:], plan.num_query_tokens[middle:]
            self._fill_chunks(host, narrow[self.narrow["chunk_start"]], plan, padding[0])
        if size.num_draft_tokens:
            self._fill_drafts(host, narrow[self.narrow["decode_start"]], plan, state)
        if self.has_draft_model:
            self._fill_next(host, plan)
        if counts is not None:
            narrow[self.narrow["counts"]] = counts

    def padding(self, state: SlotLayout) -> I64:
        """Return a buffer of padding only."""
        host = np.empty(self.num_int64, np.int64)
        self.fill(host, _NO_ROWS, _NONE.astype(np.int64), _NONE, state)
        return host

    def _fill_chunks(self, host: I64, start: I32, plan: StepPlan, padding_slot: int) -> None:
        before, middle, count = self.size.num_decode_tokens, plan.num_decodes, len(plan.token_ids)
        counts, num_chunks = plan.num_query_tokens[middle:], plan.num_rows - middle
        np.cumsum(counts, out=start[1 : num_chunks + 1])
        start[num_chunks + 1 :] = count
        token_slots, positions = host[self.wide["token_slots"]], host[self.wide["positions"]]
        ids, last = host[self.wide["ids"]], host[self.wide["last"]]
        inside = slice(before, before + count)
        token_slots[:], positions[:], ids[:], last[:] = padding_slot, 0, 0, 0
        token_slots[:middle] = plan.slots[:middle]
        token_slots[inside] = np.repeat(plan.slots[middle:], counts)
        offset = start[:num_chunks] - plan.num_computed_tokens[middle:]
        positions[inside] = np.arange(count) - np.repeat(offset, counts)
        ids[inside] = plan.token_ids
        num_decode_tokens = middle + plan.num_draft_tokens
        last[:num_decode_tokens] = np.arange(num_decode_tokens)
        last[before : before + num_chunks] = before - 1 + start[1 : num_chunks + 1]

    def _fill_next(self, host: I64, plan: StepPlan) -> None:
        capacity, follows = host[self.wide["capacity"]], host[self.wide["follows"]]
        capacity[:], follows[:] = 0, 0
        if plan.next_drafts is None:
            return
        decodes, middle = self.size.num_decodes, plan.num_decodes
        num_chunks, count = plan.num_rows - middle, len(plan.token_ids)
        chunk_rows = slice(decodes, decodes + num_chunks)
        samples = plan.wants_logits[middle:]
        capacity[:middle] = plan.next_drafts.capacity[:middle]
        capacity[chunk_rows] = np.where(samples, plan.next_drafts.capacity[middle:], 0)
        if num_chunks:
            chosen = -1 - np.arange(decodes + num_chunks)
            follows[:decodes] = chosen[:decodes]
            of_chunks = follows[decodes : decodes + count]
            of_chunks[:-1] = plan.token_ids[1:]
            last = np.cumsum(plan.num_query_tokens[middle:]) - 1
            of_chunks[last] = np.where(samples, chosen[decodes:], plan.next_drafts.following)

    def _fill_drafts(self, host: I64, start: I32, plan: StepPlan, state: SlotLayout) -> None:
        """Fill the columns of draft tokens, and the slots of decodes' tokens. Chunks have no draft tokens."""
        num_rows, end = plan.num_decodes, self.size.num_decode_tokens
        counts, count = plan.num_query_tokens[:num_rows], num_rows + plan.num_draft_tokens
        counts.cumsum(out=start[1 : num_rows + 1])
        start[num_rows + 1 :] = count
        num_drafts, first = host[self.wide["num_drafts"]], host[self.wide["first"]]
        num_drafts[:num_rows], num_drafts[num_rows:] = counts - 1, 0
        first[:num_rows], first[num_rows : self.size.num_decodes] = start[:num_rows], 0
        first[self.size.num_decodes :] = np.arange(end, self.size.num_sampled)
        token_slots, words = host[self.wide["token_slots"]], host[self.wide["token_words"]]
        offsets, until_end = host[self.wide["offsets"]], host[self.wide["until_end"]]
        last_token = state.column("last_token")
        token_slots[count:end] = state.padding_slot
        words[count:] = last_token + state.padding_slot
        offsets[count:] = until_end[count:] = 0
        slots, place = plan.slots[:num_rows].repeat(counts), offsets[:count]
        token_slots[:count] = slots
        np.subtract(np.arange(count), start[:num_rows].repeat(counts), out=place)
        np.subtract(counts.repeat(counts), place, out=until_end[:count])
        drafts = state.drafts - 1 + token_slots[:count] * state.max_drafts + place
        words[:count] = np.where(place == 0, last_token + slots, drafts)


def _place(lengths: Mapping[str, int]) -> tuple[dict[str, slice], int]:
    """Return consecutive slices of these lengths, and the sum of the lengths."""
    places = {}
    start = 0
    for name, length in lengths.items():
        places[name] = slice(start, start + length)
        start += length
    return places, start
