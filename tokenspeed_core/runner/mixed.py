"""Steps with prompt chunks as CUDA graphs: the model's forward, padded to a bucket of decodes and chunk tokens.

Launching a forward kernel by kernel takes the host longer than the device takes to run it, up to thousands
of tokens. Here inputs are made by a dozen kernels, attention prepares, and one graph runs the layers. Tokens
and rows stand as `[decodes, padding, chunks, padding]`; padding names the padding slot.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tokenspeed_core.kernels.attention import AttentionStep
from tokenspeed_core.models import Model
from tokenspeed_core.runner.attention import AttentionGroup
from tokenspeed_core.runner.inputs import GroupInputs
from tokenspeed_core.runner.link import Link
from tokenspeed_core.runner.rows import DeviceRows
from tokenspeed_core.runner.sampler import Rows
from tokenspeed_core.step import I32, I64, StepPlan

_MOST_CHUNKS = 64
_FEW_TOKENS = 512  # up to here, padding decodes costs as much as the chunk itself
_SMALLEST_CHUNK = 32


def mixed_sizes(max_num_tokens: int, most_decodes: int) -> tuple[tuple[int, int], ...]:
    """Return buckets (decodes, chunk tokens): tokens in steps of a third or a half, decodes in a few sizes."""
    tokens = [_SMALLEST_CHUNK]
    while tokens[-1] < max_num_tokens:
        power = 1 << (tokens[-1].bit_length() - 1)
        half = power + power // 2
        tokens.append(half if tokens[-1] == power >= 256 else 2 * power)
    tokens = sorted({min(each, max_num_tokens) for each in tokens})
    few = sorted({0, *(size for size in (16, 64) if size < most_decodes), most_decodes})
    return tuple(
        (decodes, each) for each in tokens for decodes in (few if each <= _FEW_TOKENS else (0, most_decodes))
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Bucket:
    """A captured forward, and the attention steps that are its own."""

    num_decodes: int
    num_tokens: int
    inputs: tuple[GroupInputs, ...]
    graph: torch.cuda.CUDAGraph


@dataclass(frozen=True, slots=True, eq=False)
class MixedLaunch:
    """A launched forward: hidden states, and which of them the sampling rows need (int64 [R])."""

    hidden: torch.Tensor
    index: torch.Tensor
    rows: Rows


class MixedGraphs:
    """Captured forwards of steps with chunks, on the stream that is current."""

    def __init__(
        self, rows: DeviceRows, groups: Sequence[AttentionGroup], model: Model, link: Link, *,
        sizes: Sequence[tuple[int, int]], block_size: int, max_model_len: int,
    ) -> None:
        """Allocate the inputs that all buckets share. `sizes` are pairs (decodes, chunk tokens), by tokens."""
        device = rows.state.device
        self._rows, self._groups, self._model, self._link = rows, groups, model, link
        self._block_size, self._max_model_len = block_size, max_model_len
        self._sizes = tuple(sizes)
        self._most_decodes, self._most_tokens = max(d for d, _ in sizes), max(t for _, t in sizes)
        self._most_chunks = min(_MOST_CHUNKS, rows.layout.num_slots - 1)
        num_rows, num_tokens = self._most_decodes + self._most_chunks, self._most_decodes + self._most_tokens
        self._decode_start = torch.arange(self._most_decodes + 1, dtype=torch.int32, device=device)
        self._query_start = torch.zeros(self._most_chunks + 1, dtype=torch.int32, device=device)
        self._seq_lens = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._tables = [torch.zeros_like(table[:1]).repeat(num_rows, 1) for table in rows.tables]
        self._mappings = [torch.zeros(num_tokens, dtype=torch.int64, device=device) for _ in groups]
        self._token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self._positions = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self._hidden: torch.Tensor | None = None
        self._buckets: dict[tuple[int, int], _Bucket] = {}

    def capture(self, pool: Any, progress: Callable[[int, int], None]) -> None:
        """Capture all buckets into a memory pool, the largest first."""
        ordered = sorted(self._sizes, key=sum, reverse=True)
        for done, (decodes, tokens) in enumerate(ordered):
            progress(done, len(ordered))
            self._buckets[decodes, tokens] = self._capture(decodes, tokens, pool)
        progress(len(ordered), len(ordered))

    def fits(self, plan: StepPlan) -> bool:
        """Say whether a step has chunks, and is within the largest bucket."""
        chunks = plan.num_rows - plan.num_decodes
        return (
            0 < chunks <= self._most_chunks and plan.num_decodes <= self._most_decodes
            and len(plan.token_ids) <= self._most_tokens
        )

    def run(self, plan: StepPlan) -> MixedLaunch:
        """Launch a step that fits."""
        bucket = self._bucket(plan.num_decodes, len(plan.token_ids))
        launch = self._make(bucket, plan)
        for group, inputs in zip(self._groups, bucket.inputs, strict=True):
            group.begin(inputs)
        bucket.graph.replay()
        return launch

    def _bucket(self, num_decodes: int, num_tokens: int) -> _Bucket:
        """Return the bucket with the fewest chunk tokens, then decodes, that holds a step."""
        for decodes, tokens in self._sizes[bisect_left(self._sizes, num_tokens, key=lambda size: size[1]) :]:
            if decodes >= num_decodes:
                return self._buckets[decodes, tokens]
        raise AssertionError("the step was said to fit")

    def _make(self, bucket: _Bucket, plan: StepPlan) -> MixedLaunch:
        """Apply the plan's deltas, move the slots' lengths on, and fill the shared inputs."""
        state, decodes = self._rows, bucket.num_decodes
        words, values = state.layout.writes(plan)
        padded = _Padded.of(plan, bucket, self._most_chunks, state.layout.padding_slot)
        sampled = np.flatnonzero(plan.wants_logits)
        at_rows = np.where(sampled < plan.num_decodes, sampled, sampled - plan.num_decodes + decodes)
        sent = self._link.send((
            words, values, padded.slots, padded.advance, padded.token_slots, padded.offsets, padded.ids,
            padded.query_start, at_rows, padded.last_tokens[sampled],
        ))
        device_words, device_values, slots, advance, token_slots, offsets, ids, query_start, at, last = sent
        if len(words):
            state.state.index_copy_(0, device_words, device_values)
        positions = torch.add(state.seq_len[token_slots], offsets, out=self._positions[: len(padded.ids)])
        self._token_ids[: len(padded.ids)].copy_(ids)
        if decodes:
            self._token_ids[:decodes].copy_(state.last_token[slots[:decodes]])
        seq_lens = torch.add(state.seq_len[slots], advance, out=self._seq_lens[: len(padded.slots)])
        state.seq_len.index_copy_(0, slots, seq_lens)
        self._query_start.copy_(query_start)
        block = torch.div(positions, self._block_size, rounding_mode="floor")
        inside = positions % self._block_size
        for table, gathered, mapping in zip(state.tables, self._tables, self._mappings, strict=True):
            torch.index_select(table, 0, slots, out=gathered[: len(padded.slots)])
            page = table[token_slots, block]
            torch.add(inside, page, alpha=self._block_size, out=mapping[: len(padded.ids)])
        rows = Rows(sampled.astype(np.int32), plan.slots[sampled], slots[at], seq_lens[at].to(torch.int64))
        assert self._hidden is not None, "a bucket was captured"
        return MixedLaunch(self._hidden, last, rows)

    def _capture(self, decodes: int, tokens: int, pool: Any) -> _Bucket:
        total = decodes + tokens
        inputs = tuple(
            self._inputs(mapping[:total], table, decodes, tokens)
            for mapping, table in zip(self._mappings, self._tables, strict=True)
        )
        for group, group_inputs in zip(self._groups, inputs, strict=True):
            group.begin(group_inputs)
        self._seq_lens.zero_()
        self._query_start.zero_()
        for mapping in self._mappings:
            mapping.fill_(-1)
        hidden = self._model.forward(self._token_ids[:total], self._positions[:total])
        if self._hidden is None:
            self._hidden = torch.empty_like(hidden)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        self._hidden[:total].copy_(self._model.forward(self._token_ids[:total], self._positions[:total]))
        graph.capture_end()
        return _Bucket(decodes, tokens, inputs, graph)

    def _inputs(self, mapping: torch.Tensor, table: torch.Tensor, decodes: int, tokens: int) -> GroupInputs:
        rows = decodes + self._most_chunks
        prefills = AttentionStep(
            num_rows=self._most_chunks, num_tokens=tokens, max_num_query=tokens, max_seq_len=self._max_model_len,
            query_start=self._query_start, seq_lens=self._seq_lens[decodes:rows], block_table=table[decodes:rows],
            host_query_start=None, host_seq_lens=None,
        )
        if not decodes:
            return GroupInputs(mapping, prefills, 0, None, None)
        before = AttentionStep(
            num_rows=decodes, num_tokens=decodes, max_num_query=1, max_seq_len=self._max_model_len,
            query_start=self._decode_start[: decodes + 1], seq_lens=self._seq_lens[:decodes],
            block_table=table[:decodes], host_query_start=None, host_seq_lens=None,
        )
        return GroupInputs(mapping, prefills, decodes, before, prefills)


@dataclass(frozen=True, slots=True, eq=False)
class _Padded:
    """A plan's columns in a bucket's layout: rows first decodes, then chunks, each padded; tokens likewise.

    `query_start` counts from the first chunk token; `last_tokens` has the last token of each row of the plan.
    """

    slots: I64
    advance: I32
    token_slots: I64
    offsets: I64
    ids: I64
    query_start: I32
    last_tokens: I64

    @classmethod
    def of(cls, plan: StepPlan, bucket: _Bucket, most_chunks: int, padding_slot: int) -> _Padded:
        decodes, tokens = bucket.num_decodes, bucket.num_tokens
        middle, chunks = plan.num_decodes, plan.num_rows - plan.num_decodes
        counts, num_chunk_tokens = plan.num_query_tokens[middle:], len(plan.token_ids)
        slots = np.full(decodes + most_chunks, padding_slot, np.int64)
        slots[:middle] = plan.slots[:middle]
        slots[decodes : decodes + chunks] = plan.slots[middle:]
        advance = np.zeros(decodes + most_chunks, np.int32)
        advance[:middle] = 1
        advance[decodes : decodes + chunks] = counts
        query_start = np.full(most_chunks + 1, num_chunk_tokens, np.int32)
        query_start[0] = 0
        np.cumsum(counts, out=query_start[1 : chunks + 1])
        token_slots = np.full(decodes + tokens, padding_slot, np.int64)
        offsets, ids = np.zeros(decodes + tokens, np.int64), np.zeros(decodes + tokens, np.int64)
        inside = slice(decodes, decodes + num_chunk_tokens)
        token_slots[:middle] = plan.slots[:middle]
        token_slots[inside] = np.repeat(plan.slots[middle:], counts)
        offsets[inside] = np.arange(num_chunk_tokens) - np.repeat(query_start[:chunks], counts)
        ids[inside] = plan.token_ids
        last = np.arange(plan.num_rows)
        last[middle:] = decodes + query_start[1 : chunks + 1] - 1
        return cls(slots, advance, token_slots, offsets, ids, query_start, last)
