"""Steps as CUDA graphs: inputs from the slots' state, forward, greedy tokens, and the slots' next state.

Launching a forward kernel by kernel takes the host longer than the device needs to run it, up to thousands of tokens.
Each bucket therefore has one graph, or two if attention backends prepare between them (outside graphs, with the step's
lengths on the device); one graph that keeps the logits for draws; and, for each number of rows, one that draws. Buckets
of many decodes have a variant for short rows that share no prefix, for which attention prepares on the host. Buckets
with draft tokens also verify them, after greedy tokens and again after draws. A draft model may run after a step.
Engines that share experts run the same bucket in a step, so that collectives always have their captured size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from tokenspeed_core.api.step import I32, I64, NextDrafts, StepPlan, StepSize
from tokenspeed_core.worker.buckets import BucketFinder
from tokenspeed_core.worker.captured_inputs import (
    SharedBuffers,
    captured_group_inputs,
)
from tokenspeed_core.worker.captured_stages import GraphContext, StepStages
from tokenspeed_core.worker.captured_step import Bucket, Follow, GraphLaunch
from tokenspeed_core.worker.draft_graphs import DraftGraphs, FollowedRows
from tokenspeed_core.worker.draft_passes import PassBounds
from tokenspeed_core.worker.drafts import DraftRows, SampledTokens
from tokenspeed_core.worker.graph_recorder import GraphRecorder
from tokenspeed_core.worker.padding import SharedPadding
from tokenspeed_core.worker.sampler import SamplingRows
from tokenspeed_core.worker.staged import BucketSize, StagedLayout
from tokenspeed_core.worker.transfer import PinnedRing

# Words of a chunk: its length, its sampling parameters, and a few blocks more than its tokens fill.
_WORDS_OF_CHUNK = 16
_HAS_CAPACITY = b"\xff\xff\xff\xff"  # ends keys with a capacity; not a number of query tokens
_MAX_LAUNCHES = 64  # that a bucket with draft tokens caches


class StepGraphs:
    """Captured steps. Runs on the current stream, which must not be the default one."""

    def __init__(self, context: GraphContext, sizes: Sequence[BucketSize]) -> None:
        """Allocate the buffers that all buckets share."""
        self._context = context
        attention = [kernel for group in context.groups for kernel in group.kernels.values()]
        self._needs_prepare = not all(
            getattr(kernel, "prepares_on_host", False) for kernel in attention
        )
        usual = [size for size in sizes if not size.no_shared_prefix]
        has_draft_model = context.drafter is not None
        self._finder = BucketFinder(usual)
        self._layouts = {
            size: StagedLayout(
                size,
                self._num_words(size),
                has_draft_model=has_draft_model and (size.is_followed or size.num_draft_tokens > 0),
                num_engines=context.num_engines,
            )
            for size in (usual if self._needs_prepare else sizes)
        }
        longest = max(layout.num_int64 for layout in self._layouts.values())
        self._buffers = SharedBuffers(context.state, sizes, longest)
        self._stages = StepStages(context, self._buffers)
        self._ring = PinnedRing(self._buffers.staged.nbytes)
        self._buckets: dict[BucketSize, Bucket] = {}
        self._draws: dict[int | BucketSize, torch.cuda.CUDAGraph] = {}
        self._uploaded: tuple[BucketSize, bytes] | None = None
        self._counts: I32 | None = None  # each engine's tokens in a step that several execute
        self._plan_rows = np.arange(len(self._buffers.ids), dtype=np.int32)
        self._views: dict[int, tuple[torch.Tensor, ...]] = {}
        self._kinds: set[tuple[int, ...]] = set()  # kinds of which a bucket has run
        self._recorder: GraphRecorder | None = None

    def capture(self, progress: Callable[[int, int], None]) -> None:
        """Capture all buckets, the largest first, since it sizes the memory that they share.

        The warm-up steps must have run. Some kernels allocate counters in their first call for few rows, and only a graph
        that records this call would set them to zero.
        """
        self._recorder = record = GraphRecorder()
        drafts = self._draft_graphs(record)
        ordered = sorted(
            self._layouts, key=lambda size: (size.num_sampled, size.num_tokens), reverse=True
        )
        for done, size in enumerate(ordered):
            progress(done, len(ordered))
            self._buckets[size] = self._capture(size, record, drafts)
        for size, bucket in self._buckets.items():
            if not size.no_shared_prefix:
                variant = replace(size, no_shared_prefix=True)
                bucket.no_shared_prefix = self._buckets.get(variant)
        progress(len(ordered), len(ordered))

    def release(self) -> None:
        """Free all captured steps. Nothing may be in flight."""
        if self._recorder is not None:
            self._recorder.release()

    def invalidate(self) -> None:
        """Note that an eager step changed the slots' state, so that the next upload is not skipped."""
        self._uploaded = None

    def find(self, plan: StepPlan) -> Bucket | None:
        """Return the bucket for a step, None if no bucket holds it. Decodes without chunks must all sample."""
        size = self._finder.find(plan)
        if size is None:
            return None
        bucket = self._buckets[size]
        variant = bucket.no_shared_prefix
        if variant is not None and self._context.flags.no_shared_prefix(plan):
            return variant
        return bucket

    def find_shared(self, sizes: Sequence[StepSize]) -> Bucket | None:
        """Return the bucket for the next step of all engines, None if no bucket holds it. All engines find the same.

        They must find the same variant, because NCCL may register a captured collective's buffers with all processes.
        """
        size = self._finder.find_shared(sizes)
        if size is None:
            return None
        counts = [(each.num_decode_tokens, each.num_chunk_tokens) for each in sizes]
        self._counts = np.array(counts, np.int32).reshape(-1)
        bucket = self._buckets[size]
        variant = bucket.no_shared_prefix
        if variant is not None and all(each.no_shared_prefix for each in sizes):
            return variant
        return bucket

    def run(self, bucket: Bucket, plan: StepPlan) -> GraphLaunch:
        """Launch a step that a bucket holds. The plan has no rows if only other engines have requests."""
        size = bucket.layout.size
        key = self._upload(bucket, plan)
        bucket.graphs[0].replay()
        if self._needs_prepare:
            self._prepare(bucket)
            bucket.graphs[1].replay()
        if bucket.drafts is not None:
            return self._draft_launch(bucket, bucket.drafts, plan, key)
        if not size.num_chunks:
            return self._decode_launch(bucket, plan)
        sampled = np.flatnonzero(plan.wants_logits)
        chunk_rows = sampled - plan.num_decodes + size.num_decodes
        at = np.where(sampled < plan.num_decodes, sampled, chunk_rows)
        rows = SamplingRows(
            sampled.astype(np.int32),
            plan.slots[sampled],
            bucket.columns["slots"],
            self._buffers.new_positions,
            bucket.buffers.token_ids,
            bucket.columns["last"],
        )
        return GraphLaunch(
            rows,
            bucket.ids,
            at,
            bucket.logits,
            bucket.draw,
            partial(self._stages.choose_again, bucket),
            follow=self._follow_of(bucket, plan, rows, at),
        )

    def _decode_launch(self, bucket: Bucket, plan: StepPlan) -> GraphLaunch:
        num_rows = plan.num_rows
        if num_rows not in self._views:
            self._views[num_rows] = (
                bucket.columns["slots"][:num_rows],
                self._buffers.new_positions[:num_rows],
                self._buffers.ids[:num_rows],
            )
        slots, positions, ids = self._views[num_rows]
        token_ids = bucket.buffers.token_ids
        rows = SamplingRows(
            self._plan_rows[:num_rows], plan.slots, slots, positions, token_ids, None
        )
        again = partial(self._stages.choose_again, bucket)
        return GraphLaunch(rows, ids, None, bucket.logits, bucket.draw, again)

    def _draft_launch(
        self, bucket: Bucket, drafts: DraftRows, plan: StepPlan, key: bytes
    ) -> GraphLaunch:
        """Return the launch of decodes with draft tokens. Steps with the same `key` have the same rows."""
        launch = bucket.launches.get(key)
        if launch is None:
            if len(bucket.launches) >= _MAX_LAUNCHES:
                bucket.launches.clear()
            launch = bucket.launches[key] = self._verifying_launch(bucket, drafts, plan)
        follow = self._follow_of(bucket, plan, launch.rows, None)
        return launch if follow is None else replace(launch, follow=follow)

    def _verifying_launch(self, bucket: Bucket, drafts: DraftRows, plan: StepPlan) -> GraphLaunch:
        num_tokens, num_rows = plan.num_tokens, plan.num_rows
        rows = SamplingRows(
            self._plan_rows[:num_rows].repeat(plan.num_query_tokens),
            plan.slots.repeat(plan.num_query_tokens),
            bucket.slots[:num_tokens],
            bucket.buffers.new_positions[:num_tokens],
            bucket.buffers.token_ids,
            self._buffers.places[:num_tokens],
            drafts.of_step(SampledTokens.of(plan)),
        )
        return GraphLaunch(
            rows,
            bucket.ids[:num_tokens],
            None,
            bucket.logits,
            bucket.draw,
            partial(self._stages.choose_again, bucket),
            bucket.num_new[:num_rows],
            bucket.verified[: len(bucket.verified) - len(bucket.ids) + num_tokens],
        )

    def _follow_of(
        self, bucket: Bucket, plan: StepPlan, rows: SamplingRows, at: I64 | None
    ) -> Follow | None:
        if plan.next_drafts is None:
            return None
        return partial(self._follow, bucket, plan.next_drafts, rows, at)

    def _num_words(self, size: BucketSize) -> int:
        """Return how many changed words a bucket's upload holds; steps with more scatter them before it."""
        num_blocks = size.num_chunk_tokens // self._context.block_size
        per_group = size.num_decodes + size.num_chunks + num_blocks
        num_words = per_group * len(self._context.groups) + _WORDS_OF_CHUNK * size.num_chunks
        return num_words + size.num_draft_tokens

    def _upload(self, bucket: Bucket, plan: StepPlan) -> bytes:
        """Copy a plan to the device. Copy nothing if the device has exactly these decodes already.

        Returns a key of the rows of decodes: their slots, query tokens, and the capacity for a draft model.
        """
        layout, state = bucket.layout, self._context.state
        words, values = state.layout.writes(plan)
        if len(words) > layout.num_words:
            device_words, device_values = self._context.transfer.send((words, values))
            state.words.index_copy_(0, device_words, device_values)
            words, values = words[:0], values[:0]
        rows = plan.slots.tobytes()
        if bucket.drafts is not None:
            rows += plan.num_query_tokens.tobytes()
        if plan.next_drafts is not None:
            rows += plan.next_drafts.capacity.tobytes() + _HAS_CAPACITY
        if self._counts is not None:
            rows += self._counts.tobytes()
        uploaded = None if layout.size.num_chunks else (layout.size, rows)
        if uploaded is not None and not len(words) and uploaded == self._uploaded:
            return rows
        num_bytes = bucket.staged.nbytes
        pinned, host, event = self._ring.take(num_bytes)
        key = None if uploaded is None or bucket.drafts is None else rows
        layout.fill(
            host[:num_bytes].view(np.int64), plan, words, values, state.layout, self._counts, key
        )
        bucket.staged.copy_(pinned[:num_bytes].view(torch.int64), non_blocking=True)
        event.record()
        self._uploaded = uploaded
        return rows

    def _prepare(self, bucket: Bucket) -> None:
        for group, inputs in zip(self._context.groups, bucket.inputs, strict=True):
            group.begin(inputs)

    def _draft_graphs(self, record: GraphRecorder) -> DraftGraphs | None:
        context = self._context
        if context.drafter is None:
            return None
        longest, width = context.max_model_len, context.state.layout.num_blocks
        return DraftGraphs(
            context.drafter,
            record,
            lambda num_rows: PassBounds(num_rows, longest, width),
            needs_prepare=self._needs_prepare,
        )

    def _capture(
        self, size: BucketSize, record: GraphRecorder, drafts: DraftGraphs | None
    ) -> Bucket:
        bucket = self._bucket(size)
        padding = bucket.layout.padding(self._context.state.layout)
        bucket.staged.copy_(torch.from_numpy(padding))
        followed = None
        if drafts is not None and bucket.layout.has_draft_model:
            followed = self._followed(bucket)
        # A draft model allocates in its first passes over a number of rows.
        num_followed = size.num_rows if followed else 0
        kind = (size.num_chunks > 0, size.num_draft_tokens > 0, size.no_shared_prefix, num_followed)
        if kind not in self._kinds:
            self._kinds.add(kind)
            self._run_once(bucket, drafts, followed)
        self._record(bucket, record, drafts, followed)
        return bucket

    def _run_once(
        self, bucket: Bucket, drafts: DraftGraphs | None, followed: FollowedRows | None
    ) -> None:
        """Run all stages of a bucket: kernels compile, and libraries allocate what all sizes use."""
        stages = self._stages
        for stage in (stages.begin, stages.forward, stages.keep, stages.draw):
            self._prepare(bucket)
            stage(bucket)
        if drafts is not None and followed is not None:
            drafts.run_once(followed)

    def _record(
        self,
        bucket: Bucket,
        record: GraphRecorder,
        drafts: DraftGraphs | None,
        followed: FollowedRows | None,
    ) -> None:
        """Record the graphs of a bucket."""
        record.synchronize()
        size = bucket.layout.size
        begin, forward, keep, draw_again = (
            partial(stage, bucket)
            for stage in (
                self._stages.begin,
                self._stages.forward,
                self._stages.keep,
                self._stages.draw,
            )
        )
        self._prepare(bucket)
        if self._needs_prepare:
            bucket.graphs = [record(begin), record(forward)]
        else:
            bucket.graphs = [record(begin, forward)]
        bucket.keep_graph = record(keep)
        del bucket.own_logits
        key = size if size.num_draft_tokens else size.num_rows
        if key not in self._draws:
            self._draws[key] = record(draw_again)
        bucket.draw_graph = self._draws[key]
        if drafts is not None and followed is not None:
            bucket.follow = drafts.capture(followed)
            bucket.own_states = None

    def _followed(self, bucket: Bucket) -> FollowedRows:
        columns, drafter, drafts = bucket.columns, self._context.drafter, bucket.drafts
        assert drafter is not None, "a draft model follows"

        def extend() -> torch.Tensor | None:
            buffers = bucket.buffers
            following = bucket.ids.to(torch.int64).clamp_(min=0)
            if drafts is not None:
                newest = drafts.first + bucket.num_new - 1
            else:
                newest, follows = columns["last"], columns["follows"]
                chosen = following[(-1 - follows).clamp_(min=0)]
                following = torch.where(follows < 0, chosen, follows)
            return drafter.extend(
                buffers.token_ids, following, buffers.positions, bucket.own_states, newest
            )

        return FollowedRows(
            columns["slots"], columns["capacity"], extend, partial(self._prepare, bucket)
        )

    def _bucket(self, size: BucketSize) -> Bucket:
        layout = self._layouts[size]
        staged = self._buffers.staged[: layout.num_int64]
        columns = layout.columns(staged)
        buffers = self._buffers.of(size, columns)
        has_drafts = size.num_draft_tokens > 0
        inputs = tuple(
            captured_group_inputs(
                size,
                kv_slots,
                table,
                buffers.seq_lens,
                columns.get("decode_start", self._buffers.decode_start),
                columns.get("chunk_start"),
                self._context.max_model_len,
                self._context.max_drafts,
                takes_drafts=group.takes_drafts,
            )
            for group, table, kv_slots in zip(
                self._context.groups, buffers.tables, buffers.kv_slots, strict=True
            )
        )
        slots = columns["token_slots"] if has_drafts else columns["slots"]
        verified = self._buffers.verified(size)
        holder = verified if has_drafts else self._buffers.ids[: size.num_sampled]
        ids, num_new = holder[-size.num_sampled :], verified[: size.num_rows]
        drafts = None
        if has_drafts:
            drafts = DraftRows.staged(columns, buffers.seq_lens, self._context.max_drafts)
        bucket = Bucket(
            layout, staged, columns, buffers, inputs, slots, ids, num_new, verified, drafts
        )
        if "counts" in columns:
            bucket.padding = SharedPadding(size, columns["counts"])
        return bucket

    def _follow(
        self,
        bucket: Bucket,
        following: NextDrafts,
        rows: SamplingRows,
        at: I64 | None,
        ids: torch.Tensor | None,
        num_new: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Run the draft model after the bucket's last launch. `at` are the rows of `ids`, None if they are the first."""
        drafter, transfer = self._context.drafter, self._context.transfer
        assert drafter is not None and bucket.follow is not None, "a draft model follows"
        if ids is not None and ids.data_ptr() != bucket.ids.data_ptr():  # chosen outside graphs
            if at is None:
                bucket.ids[: len(ids)] = ids
            else:
                bucket.ids.index_copy_(0, transfer.send((at,))[0], ids)
            if num_new is not None:
                bucket.num_new[: len(num_new)] = num_new
        draws = ids is not None and drafter.draws(rows)
        bucket.follow.replay(following.num_drafts, draws=draws)
        if ids is None or not following.returns_ids:
            return None
        slots = bucket.columns["slots"]
        if at is not None:
            slots = slots[transfer.send((at,))[0]]
        elif num_new is not None:
            slots = slots[: len(num_new)]
        return drafter.drafts(slots, following.num_drafts)
