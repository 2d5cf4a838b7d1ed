"""Adds rows to a step: allocates blocks for their tokens, and records the rows in the plan."""

from __future__ import annotations

import numpy as np

from tokenspeed_core.api.step import I32, I64
from tokenspeed_core.kv_cache.manager import KVManager
from tokenspeed_core.scheduler.columns import SlotColumns
from tokenspeed_core.scheduler.drafts import DraftSource
from tokenspeed_core.scheduler.lifecycle import Prefilling
from tokenspeed_core.scheduler.sequence_table import SequenceTable
from tokenspeed_core.scheduler.step_plan_builder import StepPlanBuilder


class RowPlanner:
    """Plans decodes and chunks of sequences that have a slot."""

    def __init__(
        self,
        columns: SlotColumns,
        kv: KVManager,
        sequences: SequenceTable,
        *,
        whole_prompts: bool = False,
    ) -> None:
        """Plan rows of these sequences; `kv` has their blocks. Prompts are cut into chunks unless `whole_prompts`."""
        self.columns = columns
        self.kv = kv
        self.sequences = sequences
        self._whole_prompts = whole_prompts

    def plan_decodes(
        self, builder: StepPlanBuilder, slots: I64, num_query: I32, drafts: DraftSource | None
    ) -> None:
        """Plan decodes of `num_query` tokens each, 0: none. `drafts` has the tokens after the first of each row.

        A step without new blocks runs no Python code per sequence.
        """
        columns = self.columns
        runs = num_query > 0
        if np.count_nonzero(runs) < len(runs):
            slots, num_query = slots[runs], num_query[runs]
        start = columns.num_bound[slots] - 1
        end = start + num_query
        for i in (end > columns.capacity[slots]).nonzero()[0].tolist():
            slot = slots.item(i)
            # Draft tokens in flight may be rejected: later queries start at a known token or after it.
            first_query = columns.num_known.item(slot) - 1
            has_room = self._extend(builder, slot, first_query, end.item(i))
            assert has_room, "the policy ran a row without its pages"
        columns.num_bound[slots] += num_query
        if builder.set_decodes(slots, num_query, start):
            assert drafts is not None, "the policy cannot add draft tokens"
            builder.set_drafts(drafts.take(slots, num_query - 1))

    def plan_chunk(self, builder: StepPlanBuilder, slot: int, num_tokens: int) -> None:
        """Plan the next `num_tokens` known tokens of a slot, or fewer if tokens or pages run out.

        With `whole_prompts`, a prompt that does not fit as a whole is not planned.
        """
        columns, kv = self.columns, self.kv
        start, target = int(columns.num_planned[slot]), int(columns.target[slot])
        state = self.sequences.at(slot)
        assert isinstance(state, Prefilling), "only prompts are cut into chunks"
        sequence = state.sequence
        end = min(start + num_tokens, target, kv.max_capacity(state.lease.blocks))
        if self._whole_prompts and start < sequence.num_prompt:
            # After a preemption, the output is computed again in later steps, since its tokens see only earlier ones.
            end = sequence.num_prompt if end >= sequence.num_prompt else start
        if end <= start or not self._extend(builder, slot, start, end):
            return
        is_last = end == target
        builder.add_chunk(slot, start, end, is_last=is_last)
        if scored := sequence.take_scored(start, end):
            builder.score(scored, sequence.request.prompt_logprobs)
        columns.num_planned[slot] = end
        # Other sequences may use these blocks immediately: their steps run after this one.
        kv.cache_full_blocks(state.lease.blocks, sequence.chain, end, sequence.tokens)
        if is_last:
            columns.num_bound[slot] = target + 1
            columns.num_hashed_tokens[slot] = state.lease.blocks.num_hashed_tokens
            self.sequences.start_decoding(state)

    def plan_next_drafts(
        self, builder: StepPlanBuilder, drafts: DraftSource, *, with_prompts: bool
    ) -> None:
        """Ask `drafts` whether a draft model runs after the step, and plan its draft tokens.

        Unless `with_prompts`, steps that compute prompts verify no draft tokens. A step with prompts and decodes is probably
        followed by another one, so no draft tokens are made there.
        """
        slots, num_prompt = builder.sampling_slots(), builder.num_chunk_tokens
        is_useful = with_prompts or not 0 < num_prompt < builder.num_tokens
        wanted = drafts.next_drafts(slots, builder.chunk_slots(), is_useful=is_useful)
        if wanted is None:
            return
        if wanted.num_drafts:
            self._extend_for_drafts(builder, slots, wanted.num_drafts)
        builder.set_next_drafts(wanted.num_drafts, returns_ids=wanted.returns_ids)

    def _extend_for_drafts(self, builder: StepPlanBuilder, slots: I64, num_drafts: int) -> None:
        """Make room for draft tokens, and the token before them, if every row still gets a block to decode.

        So draft tokens never cause a preemption.
        """
        columns, kv = self.columns, self.kv
        end = np.minimum(columns.num_bound[slots] + num_drafts, columns.max_len[slots])
        num_pages = kv.num_new_pages(columns.resumed[slots], columns.capacity[slots], end)
        num_kept = kv.num_groups * self.sequences.num_running
        if int(num_pages.sum()) + num_kept > kv.pool.num_available:
            return
        for i in np.flatnonzero(end > columns.capacity[slots]):
            self._extend(builder, int(slots[i]), 0, int(end[i]))

    def _extend(self, builder: StepPlanBuilder, slot: int, start: int, end: int) -> bool:
        """Make room for the tokens `[start, end)` of a slot. Returns False if pages are short."""
        blocks = self.sequences.blocks(slot)
        entries = self.kv.extend(blocks, start, end)
        if entries is None:
            return False
        self.columns.capacity[slot] = blocks.capacity
        builder.add_table_entries(slot, entries)
        return True
