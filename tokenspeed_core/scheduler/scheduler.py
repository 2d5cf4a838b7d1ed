"""The scheduler: turns requests into step plans, and step results into tokens of sequences.

It asks the policy, applies the decision, and keeps every sequence in one typed state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from tokenspeed_core.api.policy import Candidate, Decision, Limits, Policy, Room, View
from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.api.step import I32, StepResult
from tokenspeed_core.engine.messages import Outputs, Rejected, Submit
from tokenspeed_core.errors import EngineDeadError
from tokenspeed_core.kv_cache.manager import KVManager
from tokenspeed_core.scheduler.collect import (
    Collected,
    NewTokens,
    StepInFlight,
    collect,
    cut_at_end,
    make_outputs,
    prompt_logprobs,
    rows_without_slot,
)
from tokenspeed_core.scheduler.columns import SlotColumns
from tokenspeed_core.scheduler.counters import EngineCounters
from tokenspeed_core.scheduler.drafts import DraftSource
from tokenspeed_core.scheduler.lifecycle import Preempted, Prefilling, Waiting
from tokenspeed_core.scheduler.limits import SchedulerLimits
from tokenspeed_core.scheduler.sequence import Sequence
from tokenspeed_core.scheduler.sequence_table import SequenceTable
from tokenspeed_core.scheduler.step_plan_builder import StepPlanBuilder
from tokenspeed_core.scheduler.views import candidate_of, num_promised_pages, view_of_running
from tokenspeed_core.scheduler.waiting_queue import QueueEntry, WaitingQueue

# Blocks of prefix hits that a step admits, and blocks of ended sequences that it releases. Each takes about a
# microsecond, so that the sequences of a long prompt do not delay the others.
MAX_BLOCKS_PER_STEP = 16_384


@dataclass(frozen=True, slots=True)
class _Refused:
    """The first waiting sequence, which the policy refused, as the policy saw it."""

    sequence_id: int
    candidate: Candidate


class Scheduler:
    """Plans steps and applies their results. Knows no tensors, text or sockets.

    The cycle of a step: `plan`, `launch`, and, when the runner has the result, `apply` or `fail`. Several steps may
    be in flight; results are applied in the order of the launches.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVManager,
        policy: Policy,
    ) -> None:
        """Start without sequences."""
        self.limits = limits
        self.kv = kv
        self.columns = SlotColumns(limits.max_num_seqs, limits.max_model_len)
        self.sequences = SequenceTable(self.columns, kv)
        self.in_flight: deque[StepInFlight] = deque()
        self.num_preemptions = 0
        self.counters = EngineCounters()
        self.drafts: DraftSource | None = None  # gives decode rows draft tokens to verify
        self._drafts_with_prompts = True
        self._policy = policy
        self._queue = WaitingQueue(policy)
        self._refused: _Refused | None = None
        self._next_step = 1
        self._num_arrivals = 0
        self._random = np.random.default_rng(limits.seed)

    @property
    def has_work(self) -> bool:
        """Whether a sequence is live, a step is in flight, or blocks of ended sequences are to be released."""
        return bool(len(self.sequences) or self.in_flight or self.kv.num_unreleased)

    def use_drafts(self, drafts: DraftSource, *, with_prompts: bool = True) -> None:
        """Give decode rows draft tokens from now on; unless `with_prompts`, not in steps that compute prompts."""
        self.drafts = drafts
        self.sequences.on_release = drafts.end
        self._drafts_with_prompts = with_prompts

    @property
    def drafts_of_next_step(self) -> DraftSource | None:
        """The source of draft tokens, if the next step may have some."""
        if self.drafts is None or self._drafts_with_prompts or not self._has_prompts():
            return self.drafts
        return None

    def _has_prompts(self) -> bool:
        """Return whether the next step probably computes prompts."""
        may_admit = self.sequences.has_free_slot and self._refused is None
        return bool(len(self.columns.prefilling()) or (may_admit and self.sequences.num_waiting))

    # -- requests -------------------------------------------------------------------------------------

    def submit(
        self, request: Submit, make_grammar: Callable[[], object] | None = None
    ) -> Rejected | None:
        """Queue the sequences of a request, or return why not. `build_submit` has checked its values.

        `make_grammar` returns what the late source keeps for each sequence; see `Sequence.grammar`.
        """
        rejected = self.why_rejected(request)
        if rejected is not None:
            return rejected
        chain = self.kv.chain(request.cache_namespace, 0)
        if request.n > 1:
            chain.extend(
                request.prompt
            )  # shared by all sequences; a single one is hashed at admission
        seed = int(self._random.integers(2**62)) if request.seed is None else request.seed
        for i in range(request.n):
            self._num_arrivals += 1
            sequence = Sequence(
                request.request_id + i,
                request,
                seed + i,
                self._num_arrivals,
                chain.fork() if request.n > 1 else chain,
                request.prompt,
                grammar=None if make_grammar is None else make_grammar(),
            )
            if request.prompt_logprobs >= 0 and i == 0:
                sequence.num_scored = 0
            self.sequences.add(sequence)
            self._queue.push(sequence)
        return None

    def abort(self, sequence_ids: Iterable[int]) -> None:
        """End sequences at once. Ids that are unknown or finished are ignored."""
        for sequence_id in sequence_ids:
            state = self.sequences.get(int(sequence_id))
            if state is not None:
                self.sequences.end(state, FinishReason.ABORT)

    def preempt(self, slot: int) -> None:
        """Preempt a running sequence: free its slot, release its blocks, and queue it again."""
        self.num_preemptions += 1
        self._queue.push(self.sequences.preempt(slot))

    def why_rejected(self, request: Submit, num_held: int = 0) -> Rejected | None:
        """Return why a request cannot be queued, if so. `num_held` sequences wait outside the queue."""
        max_len = min(self.limits.max_model_len, self.kv.max_sequence_len)
        num_tokens = len(request.prompt) + request.max_tokens
        if not 1 <= len(request.prompt) <= num_tokens <= max_len:
            message = (
                f"the prompt has {len(request.prompt)} tokens and max_tokens is {request.max_tokens}; "
                f"the prompt needs at least 1, and together they have at most {max_len}"
            )
            return Rejected(request.request_id, "too_long", message)
        num_waiting, max_queued = self.sequences.num_waiting + num_held, self.limits.max_queued
        if request.n > max_queued:
            message = f"n is {request.n}, but the queue holds at most {max_queued} sequences"
            return Rejected(request.request_id, "bad_request", message)
        if request.n > max_queued - num_waiting:
            message = f"the queue is full: {num_waiting} of {max_queued} sequences are waiting"
            return Rejected(request.request_id, "queue_full", message)
        return self._reject_load(request)

    def _reject_load(self, request: Submit) -> Rejected | None:
        """Refuse a request beyond the limits of queued tokens and of its tenant. An idle engine takes any."""
        num_tokens, max_tokens = request.n * len(request.prompt), self.limits.max_queued_tokens
        num_waiting = self.sequences.num_waiting_tokens
        if max_tokens is not None and num_waiting and num_waiting + num_tokens > max_tokens:
            message = f"the queue is full: {num_waiting} of {max_tokens} prompt tokens are waiting"
            return Rejected(request.request_id, "queue_full", message)
        max_live = self.limits.max_live_per_tenant
        num_live = self.sequences.num_of_tenant(request.tenant)
        if max_live is not None and num_live + request.n > max_live:
            message = f"this API key has {num_live} of {max_live} unfinished sequences, and asks for {request.n} more"
            is_ever = request.n <= max_live
            return Rejected(
                request.request_id, "tenant_limit" if is_ever else "bad_request", message
            )
        return None

    # -- planning -------------------------------------------------------------------------------------

    def plan(self, max_prefill_tokens: int | None = None) -> StepPlanBuilder | None:
        """Decide the next step; None if nothing can run now. Call `launch` with the result.

        `max_prefill_tokens` bounds the prompt tokens of the step if chunked prefill is on. Raises EngineDeadError if
        the policy runs nothing although no step is in flight, since no later step would change that.
        """
        builder = StepPlanBuilder(self._next_step, self.columns, self.kv.num_groups)
        self.kv.begin(builder.step_id)
        if self.kv.num_unreleased:
            self._release_ended()
        budget = self.limits.token_budget
        if max_prefill_tokens is None or not self.limits.is_chunking:
            max_prefill_tokens = budget
        num_preemptions = self.num_preemptions
        if self.sequences.num_running:
            self._plan_running(builder, max_prefill_tokens)
        left = min(
            budget - builder.num_tokens,
            max_prefill_tokens - builder.num_chunk_tokens,
        )
        self._plan_admissions(builder, left)
        if not builder.is_empty:
            if self.drafts is not None:
                self._plan_next_drafts(builder, self.drafts)
            return builder
        if self.num_preemptions == num_preemptions:
            self._check_progress()
        return None

    def _release_ended(self) -> None:
        """Release blocks of ended sequences: some, or as many as the next step may need."""
        limits, min_available = self.limits, 0
        if self.sequences.num_running:
            num_blocks = 2 * limits.max_num_seqs + limits.max_num_tokens // self.kv.block_size
            min_available = num_blocks * self.kv.num_groups
        elif self.sequences.num_waiting:
            min_available = self.kv.pool.num_pages  # the first sequence must be admitted now
        self.kv.release_ended(MAX_BLOCKS_PER_STEP, min_available)

    def _check_progress(self) -> None:
        """Raise EngineDeadError if sequences are live and nothing is in flight."""
        if self.in_flight or not len(self.sequences):
            return
        raise EngineDeadError(
            f"the scheduling policy {self._policy} ran none of {self.sequences.num_running} running and "
            f"{self.sequences.num_waiting} waiting sequences while no step was in flight. "
            "Choose another --schedule-policy."
        )

    def _plan_running(self, builder: StepPlanBuilder, max_prefill_tokens: int) -> None:
        """Plan decodes and chunks of the running sequences, and preempt the policy's victims."""
        view = view_of_running(self.columns, self.kv, self.sequences, self.drafts_of_next_step)
        counts = self.kv.counts()
        limits = Limits(
            self.limits.token_budget,
            max_prefill_tokens,
            self.limits.is_chunking,
            counts.free + counts.cached,
            counts.pending,
        )
        decision = self._policy.decide(view, limits)
        for victim in decision.victims:
            self.preempt(int(view.slots[victim]))
        self._plan_decodes(builder, view, decision)
        for i in range(view.num_decodes, len(view.slots)):
            if decision.num_query_tokens[i]:
                self._plan_chunk(builder, int(view.slots[i]), int(decision.num_query_tokens[i]))

    def _plan_decodes(self, builder: StepPlanBuilder, view: View, decision: Decision) -> None:
        """Plan the decodes. A step without new blocks runs no Python code per sequence."""
        columns, num_decodes = self.columns, view.num_decodes
        slots, num_query = view.slots[:num_decodes], decision.num_query_tokens[:num_decodes]
        runs = num_query > 0
        if not runs.all():
            slots, num_query = slots[runs], num_query[runs]
        start = columns.num_bound[slots] - 1
        end = start + num_query
        for i in np.flatnonzero(end > columns.capacity[slots]):
            slot = int(slots[i])
            # Draft tokens in flight may be rejected: later queries start at a known token or behind it.
            first_query = int(columns.num_known[slot]) - 1
            has_room = self._extend(builder, slot, first_query, int(end[i]))
            assert has_room, "the policy ran a row without its pages"
        columns.num_bound[slots] += num_query
        if builder.set_decodes(slots, num_query, start):
            assert self.drafts is not None, "the policy cannot add draft tokens"
            builder.set_drafts(self.drafts.take(slots, num_query - 1))

    def _plan_next_drafts(self, builder: StepPlanBuilder, drafts: DraftSource) -> None:
        """Let a draft model follow the step, if it does."""
        slots = builder.sampling_slots()
        wanted = drafts.next_drafts(slots, builder.num_chunk_tokens)
        if wanted is None:
            return
        if wanted.num_drafts:
            self._extend_for_drafts(builder, slots, wanted.num_drafts)
        builder.set_next_drafts(wanted.num_drafts, returns_ids=wanted.returns_ids)

    def _extend_for_drafts(self, builder: StepPlanBuilder, slots: I32, num_drafts: int) -> None:
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

    def _plan_chunk(self, builder: StepPlanBuilder, slot: int, num_tokens: int) -> None:
        """Plan the next `num_tokens` known tokens of a slot, or fewer if tokens or pages run out."""
        columns, kv = self.columns, self.kv
        start, target = int(columns.num_planned[slot]), int(columns.target[slot])
        end = min(start + num_tokens, target, kv.max_capacity(self.sequences.blocks(slot)))
        if end <= start or not self._extend(builder, slot, start, end):
            return
        is_last = end == target
        state = self.sequences.at(slot)
        assert isinstance(state, Prefilling), "only prompts are cut into chunks"
        sequence = state.sequence
        scored_end = min(end, sequence.num_prompt - 1)
        scored = range(max(start, sequence.num_scored), scored_end)
        sequence.num_scored = max(sequence.num_scored, scored_end)
        builder.add_chunk(slot, start, end, is_last=is_last)
        if scored:
            builder.score(scored, sequence.request.prompt_logprobs)
        columns.num_planned[slot] = end
        # Others may use these blocks at once: their steps run after this one.
        kv.cache_full_blocks(state.lease.blocks, sequence.chain, end, sequence.tokens)
        if is_last:
            columns.num_bound[slot] = target + 1
            columns.num_hashed_tokens[slot] = state.lease.blocks.num_hashed_tokens
            self.sequences.start_decoding(state)

    def _extend(self, builder: StepPlanBuilder, slot: int, start: int, end: int) -> bool:
        """Make room for the tokens `[start, end)` of a slot. Returns False if pages are short."""
        blocks = self.sequences.blocks(slot)
        entries = self.kv.extend(blocks, start, end)
        if entries is None:
            return False
        self.columns.capacity[slot] = blocks.capacity
        builder.add_table_entries(slot, entries)
        return True

    # -- admission ------------------------------------------------------------------------------------

    def _plan_admissions(self, builder: StepPlanBuilder, budget: int) -> None:
        """Admit waiting sequences in the policy's order, with `budget` tokens for their first chunks."""
        skipped: list[QueueEntry] = []
        num_hit_blocks = 0
        while budget > 0 and self.sequences.has_free_slot and num_hit_blocks < MAX_BLOCKS_PER_STEP:
            state = self._first_waiting()
            if state is None:
                break
            if state.sequence.last_step > self.kv.pool.last_retired:
                skipped.append(self._queue.pop())  # a token of it is still in flight
                continue
            num_tokens = builder.num_tokens
            num_cached = self._admit(builder, state, budget)
            if num_cached is None:
                break
            num_hit_blocks += self.kv.num_groups * num_cached // self.kv.block_size
            # Without a planned token the admission still counts, so that the loop ends.
            budget -= max(1, builder.num_tokens - num_tokens)
        for entry in skipped:
            self._queue.put_back(entry)

    def _first_waiting(self) -> Waiting | Preempted | None:
        """Return the first sequence of the queue, after dropping entries of sequences that ended."""
        while (entry := self._queue.first()) is not None:
            state = self.sequences.get(entry.sequence_id)
            if isinstance(state, Waiting | Preempted):
                return state
            self._queue.pop()
        return None

    def _admit(
        self, builder: StepPlanBuilder, state: Waiting | Preempted, budget: int
    ) -> int | None:
        """Give the first waiting sequence a slot, blocks and a chunk, if the policy admits it.

        Returns the number of tokens of its prefix hit, None if the sequence waits on.
        """
        sequence, kv = state.sequence, self.kv
        room = self._room(builder, budget)
        if self._is_still_refused(sequence, room):
            return None
        sequence.chain.extend(sequence.tokens)
        match = kv.match(sequence.chain, sequence.max_cached)
        if not kv.can_hold(match, sequence.max_len):
            match = kv.no_match()
        candidate = candidate_of(sequence, match, kv)
        num_tokens = min(self._policy.admit(candidate, room), room.token_budget)
        if num_tokens <= 0:
            self._refused = _Refused(sequence.sequence_id, candidate)
            return None
        self._refused = None
        self._queue.pop(is_turn=True)
        if isinstance(state, Waiting):
            self.counters.admit(sequence, match.num_tokens, has_prefix_cache=kv.has_prefix_cache)
        blocks = kv.acquire(match)
        slot = self.sequences.admit(state, blocks, match.num_tokens)
        builder.add_sequence(slot, sequence, blocks)
        self._plan_chunk(builder, slot, num_tokens)
        return match.num_tokens

    def _is_still_refused(self, sequence: Sequence, room: Room) -> bool:
        """Whether the policy again refuses a sequence that it refused before, given the same prefix hit.

        The hit is not looked up again, because that takes time proportional to the prompt length.
        """
        refused = self._refused
        if refused is None or refused.sequence_id != sequence.sequence_id or room.is_alone:
            return False
        return self._policy.admit(refused.candidate, room) <= 0

    def _room(self, builder: StepPlanBuilder, budget: int) -> Room:
        if not self.limits.is_chunking and not builder.num_chunk_tokens:
            budget = self.limits.max_model_len  # a prompt beyond the budget runs alone
        return Room(
            budget,
            self.limits.is_chunking,
            self.kv.pool.num_available,
            num_promised_pages(self.columns, self.kv),
            len(self.columns.decoding()),
            is_alone=not self.sequences.num_running and not self.in_flight,
        )

    # -- steps in flight ------------------------------------------------------------------------------

    def launch(self, builder: StepPlanBuilder) -> StepInFlight:
        """Add a planned step to the steps in flight."""
        plan = builder.build()
        self.kv.launch(plan.step_id)
        self.columns.last_step[plan.slots] = plan.step_id
        sequence_ids = self.columns.sequence_id[plan.slots]
        flight = StepInFlight(plan, sequence_ids, builder.max_new_tokens())
        self.in_flight.append(flight)
        self._next_step += 1
        return flight

    def apply(self, result: StepResult) -> Outputs:
        """Apply the result of the oldest step in flight. Returns the new tokens of its sequences."""
        flight = self.in_flight.popleft()
        assert flight.plan.step_id == result.step_id, "results come in the order of the launches"
        self.kv.retire(result.step_id)
        collected = collect(self.columns, flight, result)
        late = self._collect_preempted(flight, result, collected)
        if result.next_draft_ids is not None and not self.in_flight:
            self._receive_drafts(flight, result.next_draft_ids)
        self._count_prefills(flight)
        if flight.plan.num_draft_tokens:
            self._observe_drafts(flight, result)
        for slot in collected.with_full_block(self.columns, self.kv.granularity):
            self.sequences.cache_known_blocks(int(slot))
        for slot, reason in collected.ended():
            self.sequences.end(self.sequences.at(slot), reason)
        prompts = prompt_logprobs(flight, result.prompt_logprobs)
        return make_outputs((collected.tokens, *late), result, prompts)

    def _count_prefills(self, flight: StepInFlight) -> None:
        """Count the sequences whose prompt was completed by a step."""
        num_decodes = flight.plan.num_decodes
        for row in np.flatnonzero(flight.max_new_tokens[num_decodes:]):
            state = self.sequences.get(int(flight.sequence_ids[num_decodes + row]))
            if state is not None:
                self.counters.first_token(state.sequence)

    def _observe_drafts(self, flight: StepInFlight, result: StepResult) -> None:
        """Count the accepted draft tokens of a step, and tell the source about them."""
        num_decodes = flight.plan.num_decodes
        num_drafts = flight.plan.num_query_tokens[:num_decodes] - 1
        rows = np.flatnonzero(num_drafts)
        num_accepted = result.num_tokens[rows] - 1
        self.counters.verify(num_drafts[rows], num_accepted)
        has_slot = self.columns.sequence_id[flight.plan.slots[rows]] == flight.sequence_ids[rows]
        kept = rows[has_slot]
        assert self.drafts is not None, "the policy cannot add draft tokens"
        self.drafts.observe(flight.plan.slots[kept], num_drafts[kept], num_accepted[has_slot])

    def _receive_drafts(self, flight: StepInFlight, token_ids: I32) -> None:
        """Give the source the draft tokens that were made after the newest step."""
        rows = np.flatnonzero(flight.plan.wants_logits)
        slots = flight.plan.slots[rows]
        has_slot = self.columns.sequence_id[slots] == flight.sequence_ids[rows]
        if self.drafts is not None:
            self.drafts.receive(slots[has_slot], token_ids.reshape(len(rows), -1)[has_slot])

    def fail(self) -> list[int]:
        """End the sequences of all steps in flight with an error. Returns their ids.

        Steps that follow a failed one have read its blocks, so they fail with it.
        """
        failed: list[int] = []
        if not self.in_flight:
            return failed
        self.kv.withdraw(self.in_flight[0].plan.step_id)
        for flight in self.in_flight:
            for sequence_id in flight.sequence_ids.tolist():
                state = self.sequences.get(sequence_id)
                if state is not None:
                    self.sequences.end(state, FinishReason.ERROR)
                    failed.append(sequence_id)
        self.kv.retire(self.in_flight[-1].plan.step_id)
        self.in_flight.clear()
        return failed

    def _collect_preempted(
        self, flight: StepInFlight, result: StepResult, collected: Collected
    ) -> list[NewTokens]:
        """Add tokens to sequences that were preempted while the step was in flight."""
        late: list[NewTokens] = []
        for row, token_ids in rows_without_slot(collected, result):
            state = self.sequences.get(int(flight.sequence_ids[row]))
            if isinstance(state, Preempted):
                new = _append_tokens(state.sequence, row, token_ids)
                late.append(new)
                if new.finish[0]:
                    self.sequences.end(state, FinishReason(int(new.finish[0])))
        return late


def _append_tokens(sequence: Sequence, row: int, token_ids: I32) -> NewTokens:
    """Append tokens to a sequence without a slot, up to its end."""
    num_known = len(sequence.tokens)
    num_cached = sequence.num_cached if num_known == sequence.num_prompt else 0
    kept = cut_at_end(
        np.asarray([len(token_ids)], np.int32),
        token_ids,
        np.asarray([sequence.max_len - num_known], np.int32),
        sequence.request.stop_token_ids[np.newaxis],
    )
    sequence.append(kept.token_ids)
    return NewTokens(
        np.asarray([row], np.int32),
        np.asarray([sequence.sequence_id], np.int64),
        kept.num_tokens,
        kept.token_ids,
        kept.finish,
        np.asarray([num_cached], np.int32),
    )
