"""Steps as CUDA graphs: inputs from the slots' state, forward, greedy tokens and the slots' next state.

Launching a forward kernel by kernel takes the host longer than the device takes to run it, up to thousands of
tokens. So per bucket there is one graph, or two where attention backends prepare between them (outside graphs,
with the step's lengths on the device), one that keeps the logits for draws, and per number of rows one that draws.
Buckets of many decodes have a plain form besides, for short rows that share no prefix, where attention prepares on the
host.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from tokenspeed_core.api.attention import AttentionStep
from tokenspeed_core.api.models import Model
from tokenspeed_core.api.step import I64, StepPlan
from tokenspeed_core.worker.attention import AttentionGroup
from tokenspeed_core.worker.inputs import GroupInputs
from tokenspeed_core.worker.sampler import RunnerKernels, SamplingRows, draw
from tokenspeed_core.worker.slots import SHORT, SlotFlags, SlotState
from tokenspeed_core.worker.staged import BucketSize, StagedLayout
from tokenspeed_core.worker.transfer import HostDeviceTransfer, PinnedRing

_WORDS_OF_CHUNK = (
    16  # its length, its sampling parameters, and a few blocks more than its tokens fill
)


@dataclass(slots=True, eq=False)
class _Bucket:
    """A captured step: its part of the upload, its inputs (views of shared buffers), and its graphs.

    `own_logits` are where the forward leaves them, for as long as it takes to capture what reads them.
    """

    layout: StagedLayout
    staged: torch.Tensor
    columns: Mapping[str, torch.Tensor]
    inputs: tuple[GroupInputs, ...]
    ids: torch.Tensor
    graphs: list[torch.cuda.CUDAGraph] = field(default_factory=list)
    own_logits: torch.Tensor = field(init=False)
    kept_logits: torch.Tensor = field(init=False)
    keeping: torch.cuda.CUDAGraph = field(init=False)
    drawing: torch.cuda.CUDAGraph = field(init=False)
    plain: _Bucket | None = None

    def logits(self) -> torch.Tensor:
        """Return the logits of the step launched last, if it was this one: a view, as of a launch's ids."""
        self.keeping.replay()
        return self.kept_logits

    def draw(self) -> None:
        """Replace the greedy tokens of the step launched last, if it was this one."""
        self.keeping.replay()
        self.drawing.replay()


@dataclass(frozen=True, slots=True, eq=False)
class GraphLaunch:
    """A launched step. `ids` int32 [rows of the bucket] are greedy until `draw` is called; `logits` returns theirs.

    `at` says where the R rows that sample stand among them, None if they are the first. All tensors are views of
    buffers that the next step overwrites (behind this one on the stream); before it one of the two may be called, once.
    """

    rows: SamplingRows
    ids: torch.Tensor
    at: I64 | None
    logits: Callable[[], torch.Tensor]
    draw: Callable[[], None]


class StepGraphs:
    """Captured steps. Runs on the stream that is current, which must not be the default one."""

    def __init__(
        self,
        state: SlotState,
        flags: SlotFlags,
        groups: Sequence[AttentionGroup],
        model: Model,
        kernels: RunnerKernels,
        transfer: HostDeviceTransfer,
        *,
        sizes: Sequence[BucketSize],
        block_size: int,
        max_model_len: int,
    ) -> None:
        """Allocate the buffers that all buckets share."""
        self._state, self._flags, self._groups, self._model, self._transfer = (
            state,
            flags,
            groups,
            model,
            transfer,
        )
        self._kernels = kernels
        self._block_size, self._max_model_len = block_size, max_model_len
        attention = [kernel for group in groups for kernel in group.kernels.values()]
        self._needs_prepare = not all(
            getattr(kernel, "prepares_on_host", False) for kernel in attention
        )
        usual = [size for size in sizes if not size.no_shared_prefix]
        self._decode_sizes = sorted(size.num_decodes for size in usual if not size.num_chunks)
        self._mixed_sizes = sorted(
            (size for size in usual if size.num_chunks),
            key=lambda size: (size.num_tokens, size.num_decodes),
        )
        self._layouts = {
            size: StagedLayout(size, self._num_words(size))
            for size in (usual if self._needs_prepare else sizes)
        }
        device, num_rows = state.words.device, max(size.num_rows for size in sizes)
        num_tokens = max(size.num_tokens for size in sizes)
        longest = max(layout.num_int64 for layout in self._layouts.values())
        self._staged = torch.zeros(longest, dtype=torch.int64, device=device)
        self._ring = PinnedRing(self._staged.nbytes)
        self._decode_start = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self._seq_lens = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._tables = [torch.zeros_like(table[:1]).repeat(num_rows, 1) for table in state.tables]
        self._mappings = [torch.zeros(num_tokens, dtype=torch.int64, device=device) for _ in groups]
        self._inputs = torch.zeros((2, self._decode_sizes[-1]), dtype=torch.int64, device=device)
        self._new_positions = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._ids = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._logits: torch.Tensor | None = None
        self._buckets: dict[BucketSize, _Bucket] = {}
        self._draws: dict[int, torch.cuda.CUDAGraph] = {}
        self._uploaded: tuple[BucketSize, bytes] | None = None
        self._plan_rows = np.arange(num_rows, dtype=np.int32)
        self._views: dict[int, tuple[torch.Tensor, ...]] = {}

    def capture(self, progress: Callable[[int, int], None]) -> None:
        """Capture all buckets, the largest first, since it sizes the memory that they share."""
        pool = torch.cuda.graph_pool_handle()
        ordered = sorted(
            self._layouts, key=lambda size: (size.num_rows, size.num_tokens), reverse=True
        )
        for done, size in enumerate(ordered):
            progress(done, len(ordered))
            self._buckets[size] = self._capture(size, pool)
        for size, bucket in self._buckets.items():
            bucket.plain = (
                None
                if size.no_shared_prefix
                else self._buckets.get(replace(size, no_shared_prefix=True))
            )
        progress(len(ordered), len(ordered))

    def invalidate(self) -> None:
        """Note that the slots' state changed by another way, so that nothing uploaded may be assumed."""
        self._uploaded = None

    def run(self, plan: StepPlan) -> GraphLaunch | None:
        """Launch a step, or return None where no bucket holds it. Decodes without chunks must all sample."""
        size = self._size(plan)
        if size is None:
            return None
        bucket = self._buckets[size]
        if bucket.plain is not None and self._flags.no_shared_prefix(plan):
            bucket = bucket.plain
        self._upload(bucket, plan)
        bucket.graphs[0].replay()
        if self._needs_prepare:
            self._prepare(bucket)
            bucket.graphs[1].replay()
        if not size.num_chunks:
            return self._decode_launch(bucket, plan)
        sampled = np.flatnonzero(plan.wants_logits)
        at = np.where(
            sampled < plan.num_decodes, sampled, sampled - plan.num_decodes + size.num_decodes
        )
        rows = SamplingRows(
            sampled.astype(np.int32),
            plan.slots[sampled],
            bucket.columns["slots"],
            self._new_positions,
        )
        return GraphLaunch(rows, bucket.ids, at, bucket.logits, bucket.draw)

    def _decode_launch(self, bucket: _Bucket, plan: StepPlan) -> GraphLaunch:
        num_rows = plan.num_rows
        if num_rows not in self._views:
            slots = bucket.columns["slots"][:num_rows]
            self._views[num_rows] = (slots, self._new_positions[:num_rows], self._ids[:num_rows])
        slots, positions, ids = self._views[num_rows]
        rows = SamplingRows(self._plan_rows[:num_rows], plan.slots, slots, positions)
        return GraphLaunch(rows, ids, None, bucket.logits, bucket.draw)

    def _num_words(self, size: BucketSize) -> int:
        """Return how many changed words a bucket's upload holds; steps with more scatter them before it."""
        per_group = size.num_decodes + size.num_chunks + size.num_chunk_tokens // self._block_size
        return per_group * len(self._groups) + _WORDS_OF_CHUNK * size.num_chunks

    def _size(self, plan: StepPlan) -> BucketSize | None:
        """Return the bucket with the fewest tokens, then decodes, that holds a step."""
        if plan.num_decodes == plan.num_rows:
            place = bisect_left(self._decode_sizes, plan.num_rows)
            fits = place < len(self._decode_sizes) and plan.wants_logits.all()
            return BucketSize(self._decode_sizes[place], 0, 0) if fits else None
        decodes, chunks, tokens = (
            plan.num_decodes,
            plan.num_rows - plan.num_decodes,
            len(plan.token_ids),
        )
        return next(
            (
                size
                for size in self._mixed_sizes
                if size.num_chunk_tokens >= tokens
                and size.num_decodes >= decodes
                and size.num_chunks >= chunks
            ),
            None,
        )

    def _upload(self, bucket: _Bucket, plan: StepPlan) -> None:
        """Bring a plan to the device; nothing if the device has just these decodes already."""
        layout, state = bucket.layout, self._state
        words, values = state.layout.writes(plan)
        if len(words) > layout.num_words:
            device_words, device_values = self._transfer.send((words, values))
            state.words.index_copy_(0, device_words, device_values)
            words, values = words[:0], values[:0]
        uploaded = None if layout.size.num_chunks else (layout.size, plan.slots.tobytes())
        if uploaded is not None and not len(words) and uploaded == self._uploaded:
            return
        pinned, host, event = self._ring.take(bucket.staged.nbytes)
        layout.fill(host[: bucket.staged.nbytes].view(np.int64), plan, words, values, self._padding)
        bucket.staged.copy_(pinned[: bucket.staged.nbytes].view(torch.int64), non_blocking=True)
        event.record()
        self._uploaded = uploaded

    @property
    def _padding(self) -> tuple[int, int]:
        """The padding slot, and the word of its length, which is 0 at all times."""
        layout = self._state.layout
        return layout.padding_slot, layout.column("seq_len") + layout.padding_slot

    def _prepare(self, bucket: _Bucket) -> None:
        for group, inputs in zip(self._groups, bucket.inputs, strict=True):
            group.begin(inputs)

    def _capture(self, size: BucketSize, pool: Any) -> _Bucket:
        bucket = self._bucket(size)
        nothing = np.zeros(self._layouts[size].num_int64, np.int64)
        nothing[bucket.layout.wide["slots"]], nothing[bucket.layout.wide["words"]] = self._padding
        if size.num_chunks:
            nothing[bucket.layout.wide["token_slots"]] = self._padding[0]
        bucket.staged.copy_(torch.from_numpy(nothing))
        stages: list[Callable[[_Bucket], None]] = [
            self._begin,
            self._forward,
            self._keep,
            self._draw,
        ]
        for stage in stages:  # compiles, and lets libraries allocate, what a capture must not
            self._prepare(bucket)
            stage(bucket)
        torch.cuda.synchronize()
        for captured in [stages[:1], stages[1:2]] if self._needs_prepare else [stages[:2]]:
            bucket.graphs.append(_record(pool, bucket, captured))
        bucket.keeping = _record(pool, bucket, stages[2:3])
        del bucket.own_logits
        if size.num_rows not in self._draws:
            self._draws[size.num_rows] = _record(pool, bucket, stages[3:])
        bucket.drawing = self._draws[size.num_rows]
        return bucket

    def _bucket(self, size: BucketSize) -> _Bucket:
        layout = self._layouts[size]
        staged = self._staged[: layout.num_int64]
        narrow = staged[layout.middle :].view(torch.int32)
        columns = {name: staged[place] for name, place in layout.wide.items()}
        columns |= {name: narrow[place] for name, place in layout.narrow.items()}
        inputs = tuple(
            self._group_inputs(size, columns, table, mapping[: size.num_tokens])
            for table, mapping in zip(self._tables, self._mappings, strict=True)
        )
        return _Bucket(layout, staged, columns, inputs, self._ids[: size.num_rows])

    def _group_inputs(
        self,
        size: BucketSize,
        columns: Mapping[str, torch.Tensor],
        table: torch.Tensor,
        mapping: torch.Tensor,
    ) -> GroupInputs:
        def part(
            first: int, num_rows: int, num_tokens: int, most: int, start: torch.Tensor
        ) -> AttentionStep:
            rows = slice(first, first + num_rows)
            return AttentionStep(
                num_rows=num_rows,
                num_tokens=num_tokens,
                max_num_query=most,
                max_seq_len=self._max_model_len,
                query_start=start,
                seq_lens=self._seq_lens[rows],
                block_table=table[rows],
                host_query_start=None,
                host_seq_lens=None,
            )

        decodes = part(
            0, size.num_decodes, size.num_decodes, 1, self._decode_start[: size.num_decodes + 1]
        )
        decodes = replace(decodes, overlaps_prefill=size.num_chunks > 0)
        if size.no_shared_prefix:
            decodes = replace(
                decodes, shares_prefix=False, max_seq_len=min(SHORT, self._max_model_len)
            )
        if not size.num_chunks:
            return GroupInputs(mapping, decodes, size.num_decodes, None, None)
        most = size.num_chunk_tokens
        chunks = part(size.num_decodes, size.num_chunks, most, most, columns["query_start"])
        if not size.num_decodes:
            return GroupInputs(mapping, chunks, 0, None, None)
        return GroupInputs(mapping, chunks, size.num_decodes, decodes, chunks)

    def _begin(self, bucket: _Bucket) -> None:
        """Write the changed words, read the slots, and move their lengths on; padding stays at length 0."""
        state, columns, size, kernels = (
            self._state,
            bucket.columns,
            bucket.layout.size,
            self._kernels,
        )
        assert kernels.advance is not None and kernels.map is not None, (
            "they are asked for on a device"
        )
        slots, num_rows = columns["slots"], size.num_rows
        token_ids, positions = self._token_inputs(bucket)
        kernels.advance(
            state.words,
            columns["words"],
            columns["values"],
            slots,
            columns["advance"],
            token_ids[: size.num_decodes],
            positions[: size.num_decodes],
            self._seq_lens[:num_rows],
            self._new_positions[:num_rows],
            *state.layout.heads,
        )
        token_slots = columns["token_slots"] if size.num_chunks else slots
        for table, gathered, mapping in zip(
            state.tables, self._tables, self._mappings, strict=True
        ):
            kernels.map(
                table,
                slots,
                token_slots,
                positions,
                gathered[:num_rows],
                mapping[: size.num_tokens],
            )

    def _forward(self, bucket: _Bucket) -> None:
        size = bucket.layout.size
        token_ids, positions = self._token_inputs(bucket)
        wanted = bucket.columns["last"] if size.num_chunks else None
        bucket.own_logits = logits = self._model.logits(
            self._model.forward(token_ids, positions, wanted)
        )
        self._note(bucket, logits, self._kernels.greedy[logits.dtype](logits))

    def _keep(self, bucket: _Bucket) -> None:
        logits = bucket.own_logits
        if self._logits is None:
            self._logits = logits.new_empty((len(self._ids), logits.shape[1]))
        bucket.kept_logits = self._logits[: len(logits)]
        bucket.kept_logits.copy_(logits)

    def _draw(self, bucket: _Bucket) -> None:
        slots, logits = bucket.columns["slots"], bucket.kept_logits
        chosen = draw(
            self._state, self._kernels.sample, logits, slots, self._new_positions[: len(logits)]
        )
        self._note(bucket, logits, chosen)

    def _note(self, bucket: _Bucket, logits: torch.Tensor, chosen: torch.Tensor) -> None:
        self._kernels.note[logits.dtype](
            logits, chosen, bucket.columns["slots"], self._state.last_token, bucket.ids
        )

    def _token_inputs(self, bucket: _Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids and positions, int64 [tokens] each: chunks' are in the upload, and decodes' come there."""
        if bucket.layout.size.num_chunks:
            return bucket.columns["ids"], bucket.columns["positions"]
        ids, positions = self._inputs[:, : bucket.layout.size.num_tokens]
        return ids, positions


def _record(
    pool: Any, bucket: _Bucket, stages: Sequence[Callable[[_Bucket], None]]
) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    for stage in stages:
        stage(bucket)
    graph.capture_end()
    return graph
