"""Planning the rows that hold a slot: what the policy sees of them, and its decision put into the draft."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tokenspeed_core.api.policy import Decision, Limits, Policy, View
from tokenspeed_core.api.step import I32
from tokenspeed_core.kv_cache.manager import KVManager
from tokenspeed_core.scheduler.columns import SlotColumns
from tokenspeed_core.scheduler.lifecycle import Prefilling, PromptPlanned
from tokenspeed_core.scheduler.limits import SchedulerLimits
from tokenspeed_core.scheduler.sequence_table import SequenceTable
from tokenspeed_core.scheduler.step_plan_builder import StepPlanBuilder

Drafts = Callable[[I32, I32], I32]  # (slots, most drafts each) -> drafts each


class Running:
    """Plans decodes and chunks. A step in which all rows decode touches no Python object per sequence."""

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVManager,
        policy: Policy,
        columns: SlotColumns,
        roster: SequenceTable,
        drafts: Drafts | None,
    ) -> None:
        """Share the scheduler's parts. `drafts` gives decode rows drafts to verify."""
        self._limits, self._kv, self._policy = limits, kv, policy
        self._columns, self._roster, self._drafts = columns, roster, drafts

    def plan(self, draft: StepPlanBuilder, budget: int, max_prefill: int) -> None:
        """Add the running sequences' rows to a draft and preempt whom the policy names."""
        view, counts = self._view(), self._kv.counts()
        limits = Limits(
            budget,
            max_prefill,
            self._limits.is_chunking,
            counts.free + counts.cached,
            counts.pending,
        )
        decision = self._policy.decide(view, limits)
        for victim in decision.victims:
            self._roster.preempt(int(view.slots[victim]))
        self._plan_decodes(draft, view, decision)
        for i in range(view.num_decodes, len(view.slots)):
            if decision.num_query_tokens[i]:
                self.plan_chunk(draft, int(view.slots[i]), int(decision.num_query_tokens[i]))

    def plan_chunk(self, draft: StepPlanBuilder, slot: int, num_tokens: int) -> None:
        """Plan the next `num_tokens` known tokens of a slot, or as many as there are, and as there are blocks for."""
        columns, kv = self._columns, self._kv
        start, target = int(columns.num_planned[slot]), int(columns.target[slot])
        end = min(start + num_tokens, target)
        if kv.num_token_groups:  # what has states alone takes no block as it goes on
            end = min(
                end,
                int(columns.capacity[slot])
                + kv.pool.num_available // kv.num_token_groups * kv.block_size,
            )
        aligned = end // kv.block_size * kv.block_size
        if kv.has_recurrent and aligned > start and (end < target or aligned < target):
            end = aligned  # a state can be kept only where a block ends
        if end <= start or not self._extend(draft, slot, start, end):
            return
        is_last = end == target
        state = self._roster.at(slot)
        assert isinstance(state, Prefilling)
        draft.chunk(slot, start, end, is_last)
        columns.num_planned[slot] = end
        kv.cache_full_blocks(state.lease.blocks, state.sequence.chain, end, is_exact=True)
        if is_last:
            columns.num_bound[slot] = target + 1
            columns.num_hashed_tokens[slot] = state.lease.blocks.num_named
            columns.set_decoding(slot, True)
            self._roster.move(state, PromptPlanned())

    def _view(self) -> View:
        """Gather the rows that want to run."""
        columns, kv = self._columns, self._kv
        decoding = columns.decoding()
        bound = columns.num_bound[decoding]
        room = columns.max_len[decoding] - bound
        able = room > 0
        if not able.all():
            decoding, room, bound = decoding[able], room[able], bound[able]
        num_query = np.ones(len(decoding), np.int32)
        if self._drafts is not None and len(decoding):
            num_query += self._drafts(decoding, room - 1)
        prefilling = columns.prefilling()
        if len(prefilling):
            slots = np.concatenate((decoding, prefilling))
            rest = columns.target[prefilling] - columns.num_planned[prefilling]
            end = np.concatenate((bound - 1 + num_query, columns.num_planned[prefilling] + 1))
            wanted = np.concatenate((num_query, rest))
        else:
            slots, wanted, end = decoding, num_query, bound - 1 + num_query
        blocks = -((columns.capacity[slots] - end) // kv.block_size)  # that each lacks
        blocks = np.maximum(blocks, 0) * kv.num_token_groups
        held = np.zeros(len(slots), np.int32)
        if int(blocks.sum()) > kv.pool.num_available:
            held = np.asarray(
                [len(self._roster.lease(int(slot)).blocks()) for slot in slots], np.int32
            )
        return View(
            slots,
            len(decoding),
            wanted,
            blocks,
            held,
            columns.priority[slots],
            columns.arrival[slots],
        )

    def _plan_decodes(self, draft: StepPlanBuilder, view: View, decision: Decision) -> None:
        columns, num = self._columns, view.num_decodes
        slots, num_query = view.slots[:num], decision.num_query_tokens[:num]
        runs = num_query > 0
        if not runs.all():
            slots, num_query = slots[runs], num_query[runs]
        start = columns.num_bound[slots] - 1
        for i in np.flatnonzero(start + num_query > columns.capacity[slots]):
            # Drafts may be rejected: only the tokens that the host has seen are certainly there.
            certain = int(columns.num_known[slots[i]]) - 1
            has_room = self._extend(draft, int(slots[i]), certain, int(start[i] + num_query[i]))
            assert has_room, "the policy let a row run without blocks"
        columns.num_bound[slots] += num_query
        draft.decodes(slots, num_query, start)

    def _extend(self, draft: StepPlanBuilder, slot: int, start: int, end: int) -> bool:
        lease = self._roster.lease(slot)
        growth = self._kv.extend(lease, start, end)
        if growth is None:
            return False
        self._columns.capacity[slot] = lease.capacity
        draft.grow(slot, growth)
        return True
