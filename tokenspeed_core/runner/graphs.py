"""Decode steps as CUDA graphs: inputs from the slots' state, forward, greedy tokens and the next state.

Per bucket of rows one graph, or two where attention backends prepare between them (outside graphs, with the
step's lengths on the device), and one more that draws tokens from the logits. Rows up to the bucket are padding.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tokenspeed_core.kernels.attention import AttentionStep
from tokenspeed_core.models import Model
from tokenspeed_core.runner.attention import AttentionGroup
from tokenspeed_core.runner.inputs import GroupInputs
from tokenspeed_core.runner.link import Link, PinnedRing
from tokenspeed_core.runner.rows import DeviceRows
from tokenspeed_core.runner.sampler import Kernel, Rows, draw, note
from tokenspeed_core.step import I32, I64, StepPlan

_STEP = 8
_MOST = 256


def capture_sizes(max_num_seqs: int, most: int | None, wanted: Sequence[int] | None) -> tuple[int, ...]:
    """Return the buckets, ascending: `wanted` ones that a step can reach, else 1, 2, 4, 8, 16, 24, …, `most`."""
    if wanted is not None:
        return tuple(sorted({size for size in wanted if size <= max_num_seqs}))
    largest = min(max_num_seqs, most or _MOST)
    return (*(size for size in (1, 2, 4, *range(_STEP, largest, _STEP)) if size < largest), largest)


@dataclass(frozen=True, slots=True, eq=False)
class _Bucket:
    """The graphs of one number of rows, and its parts of the shared buffers.

    `slots` int64 [n], `words` int64 and `values` int32 [n * groups], and `advance` int32 [n] (0 for padding)
    are parts of `staged`, which one copy fills.
    """

    num_rows: int
    staged: torch.Tensor
    slots: torch.Tensor
    words: torch.Tensor
    values: torch.Tensor
    advance: torch.Tensor
    inputs: tuple[GroupInputs, ...]
    graphs: list[torch.cuda.CUDAGraph]
    draw: torch.cuda.CUDAGraph


@dataclass(frozen=True, slots=True, eq=False)
class DecodeLaunch:
    """A launched decode step of S rows: logits [S, V] and tokens int32 [S], greedy until `draw` is called.

    All are views of buffers that the next step overwrites (behind this one on the stream).
    """

    logits: torch.Tensor
    rows: Rows
    ids: torch.Tensor
    draw: Callable[[], None]


class DecodeGraphs:
    """Captured decode steps. Runs on the stream that is current, which must not be the default one."""

    def __init__(
        self, rows: DeviceRows, groups: Sequence[AttentionGroup], model: Model,
        greedy: Mapping[torch.dtype, Kernel], sample: Kernel, link: Link, *, sizes: Sequence[int], block_size: int,
        max_model_len: int,
    ) -> None:
        """Allocate the buffers that all buckets share, for the largest of `sizes`."""
        device, largest = rows.state.device, sizes[-1]
        self._rows, self._groups, self._model, self._link = rows, groups, model, link
        self._greedy, self._sample = greedy, sample
        kernels = [bound.decode for group in groups for bound in group.kernels.values()]
        self._needs_prepare = not all(getattr(kernel, "prepares_on_host", False) for kernel in kernels)
        self._sizes, self._block_size, self._max_model_len = tuple(sizes), block_size, max_model_len
        num_words = largest * len(groups)
        self._staged = torch.zeros(_staged_words(largest, num_words), dtype=torch.int64, device=device)
        self._ring = PinnedRing(self._staged.nbytes)
        self._query_start = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self._seq_lens = torch.zeros(largest, dtype=torch.int32, device=device)
        self._tables = [torch.zeros_like(table[:1]).repeat(largest, 1) for table in rows.tables]
        self._mappings = [torch.zeros(largest, dtype=torch.int64, device=device) for _ in groups]
        self._heads = torch.zeros(2 * largest, dtype=torch.int64, device=device)
        self._new_positions = torch.zeros(largest, dtype=torch.int64, device=device)
        self._ids = torch.zeros(largest, dtype=torch.int32, device=device)
        self._logits: torch.Tensor | None = None
        self._buckets: dict[int, _Bucket] = {}
        self._uploaded: tuple[int, bytes] | None = None
        self._plan_rows = np.arange(largest, dtype=np.int32)
        self._views: dict[int, tuple[torch.Tensor, ...]] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """The buckets, ascending."""
        return self._sizes

    def capture(self, pool: Any, progress: Callable[[int, int], None]) -> None:
        """Capture all buckets into a memory pool, the largest first, since it sizes what they share."""
        for done, size in enumerate(reversed(self._sizes)):
            progress(done, len(self._sizes))
            self._buckets[size] = self._capture(size, pool)
        progress(len(self._sizes), len(self._sizes))

    def fits(self, plan: StepPlan) -> bool:
        """Say whether a step is all decodes that sample, and few enough."""
        return plan.num_decodes == plan.num_rows <= self._sizes[-1] and bool(plan.wants_logits.all())

    def invalidate(self) -> None:
        """Note that the slots' state changed by another way, so that nothing uploaded may be assumed."""
        self._uploaded = None

    def run(self, plan: StepPlan) -> DecodeLaunch:
        """Launch a step that fits."""
        num_rows = plan.num_rows
        bucket = self._buckets[self._sizes[bisect_left(self._sizes, num_rows)]]
        self._upload(bucket, plan)
        bucket.graphs[0].replay()
        if self._needs_prepare:
            self._prepare(bucket)
            bucket.graphs[1].replay()
        if num_rows not in self._views:
            assert self._logits is not None, "a bucket was captured"
            self._views[num_rows] = (
                self._logits[:num_rows], bucket.slots[:num_rows], self._new_positions[:num_rows],
                self._ids[:num_rows],
            )
        logits, slots, positions, ids = self._views[num_rows]
        rows = Rows(self._plan_rows[:num_rows], plan.slots, slots, positions)
        return DecodeLaunch(logits, rows, ids, bucket.draw.replay)

    def _upload(self, bucket: _Bucket, plan: StepPlan) -> None:
        """Bring slots and changed words to the device; nothing if the device has them already."""
        words, values = self._rows.layout.writes(plan)
        if len(words) > len(bucket.words):
            device_words, device_values = self._link.send((words, values))
            self._rows.state.index_copy_(0, device_words, device_values)
            words, values = words[:0], values[:0]
        uploaded = (bucket.num_rows, plan.slots.tobytes())
        if not len(words) and uploaded == self._uploaded:
            return
        pinned, host, event = self._ring.take(bucket.staged.nbytes)
        self._fill(bucket, host[: bucket.staged.nbytes].view(np.int64), plan.slots, words, values)
        bucket.staged.copy_(pinned[: bucket.staged.nbytes].view(torch.int64), non_blocking=True)
        event.record()
        self._uploaded = uploaded

    def _fill(self, bucket: _Bucket, host: I64, slots: I32, words: I64, values: I32) -> None:
        """Write slots, then words, then values; what is left over names the padding slot and changes nothing."""
        n, most, padding = bucket.num_rows, len(bucket.words), self._rows.layout.padding_slot
        host[: len(slots)] = slots
        host[len(slots) : n] = padding
        host[n : n + len(words)] = words
        host[n + len(words) : n + most] = self._rows.layout.column("seq_len") + padding
        packed = host[n + most :].view(np.int32)
        packed[:] = 0
        packed[: len(values)] = values
        packed[most : most + len(slots)] = 1

    def _prepare(self, bucket: _Bucket) -> None:
        for group, inputs in zip(self._groups, bucket.inputs, strict=True):
            for bound in group.kernels.values():
                bound.decode.prepare(inputs.step)

    def _capture(self, size: int, pool: Any) -> _Bucket:
        bucket = self._bucket(size)
        host = np.zeros(bucket.staged.numel(), np.int64)
        none = np.zeros(0, np.int32)
        self._fill(bucket, host, none, none.astype(np.int64), none)
        bucket.staged.copy_(torch.from_numpy(host))
        stages = [self._begin, self._forward, self._draw]
        for stage in stages:  # compiles, and lets libraries allocate, what a capture must not
            stage(bucket)
        torch.cuda.synchronize()
        if self._needs_prepare:
            bucket.graphs.append(self._record(pool, bucket, self._begin))
            bucket.graphs.append(self._record(pool, bucket, self._forward))
        else:
            bucket.graphs.append(self._record(pool, bucket, self._begin, self._forward))
        return replace(bucket, draw=self._record(pool, bucket, self._draw))

    def _record(self, pool: Any, bucket: _Bucket, *stages: Callable[[_Bucket], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        for stage in stages:
            stage(bucket)
        graph.capture_end()
        return graph

    def _bucket(self, size: int) -> _Bucket:
        most = size * len(self._groups)
        staged = self._staged[: _staged_words(size, most)]
        packed = staged[size + most :].view(torch.int32)
        inputs = tuple(
            GroupInputs(
                mapping[:size],
                AttentionStep(
                    num_rows=size, num_tokens=size, max_num_query=1, max_seq_len=self._max_model_len,
                    query_start=self._query_start[: size + 1], seq_lens=self._seq_lens[:size],
                    block_table=table[:size], host_query_start=None, host_seq_lens=None,
                ),
                size, None, None,
            )
            for table, mapping in zip(self._tables, self._mappings, strict=True)
        )
        return _Bucket(
            size, staged, staged[:size], staged[size : size + most], packed[:most], packed[most : most + size], inputs,
            [], torch.cuda.CUDAGraph(),
        )

    def _begin(self, bucket: _Bucket) -> None:
        """Write the changed words, read the slots, and move their lengths on; padding stays at length 0.

        Every line is a kernel of a microsecond or two: there are as few as torch allows.
        """
        rows, n, slots = self._rows, bucket.num_rows, bucket.slots
        rows.state.index_copy_(0, bucket.words, bucket.values)
        heads = rows.heads.index_select(1, slots)
        _, positions = self._inputs(n).copy_(heads)
        seq_lens = torch.add(heads[1], bucket.advance, out=self._seq_lens[:n])
        rows.seq_len.index_copy_(0, slots, seq_lens)
        self._new_positions[:n].copy_(seq_lens)
        block = torch.div(positions, self._block_size, rounding_mode="floor").unsqueeze(1)
        offset = positions % self._block_size
        for table, gathered, mapping in zip(rows.tables, self._tables, self._mappings, strict=True):
            torch.index_select(table, 0, slots, out=gathered[:n])
            page = gathered[:n].gather(1, block).squeeze(1)
            torch.add(offset, page, alpha=self._block_size, out=mapping[:n])

    def _inputs(self, size: int) -> torch.Tensor:
        """Return the buffer of token ids and positions, int64 [2, size]."""
        return self._heads[: 2 * size].view(2, size)

    def _forward(self, bucket: _Bucket) -> None:
        n = bucket.num_rows
        for group, inputs in zip(self._groups, bucket.inputs, strict=True):
            group.begin(inputs)
        logits = self._model.logits(self._model.forward(*self._inputs(n)))
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        self._logits[:n].copy_(logits)
        self._ids[:n].copy_(note(self._rows, bucket.slots, logits, self._greedy[logits.dtype](logits)))

    def _draw(self, bucket: _Bucket) -> None:
        assert self._logits is not None, "the forward comes first"
        n, slots = bucket.num_rows, bucket.slots
        logits = self._logits[:n]
        chosen = draw(self._rows, self._sample, logits, slots, self._new_positions[:n])
        self._ids[:n].copy_(note(self._rows, slots, logits, chosen))


def _staged_words(num_rows: int, num_words: int) -> int:
    """Return the int64 words of a bucket's upload: slots and words, then values and advances of half a word."""
    return num_rows + num_words + -(-(num_words + num_rows) // 2)

