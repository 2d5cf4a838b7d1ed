"""Gives waiting sequences a slot, blocks and their first chunk, in the policy's order."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_core.api.policy import Candidate, Policy, Room
from tokenspeed_core.scheduler.counters import EngineCounters
from tokenspeed_core.scheduler.lifecycle import Preempted, Waiting
from tokenspeed_core.scheduler.limits import SchedulerLimits
from tokenspeed_core.scheduler.rows import RowPlanner
from tokenspeed_core.scheduler.sequence import Sequence
from tokenspeed_core.scheduler.step_plan_builder import StepPlanBuilder
from tokenspeed_core.scheduler.views import candidate_of, num_promised_pages
from tokenspeed_core.scheduler.waiting_queue import QueueEntry, WaitingQueue

MAX_HIT_BLOCKS = 16_384
"""Blocks of prefix hits that a step admits. A block takes about a microsecond, so without a limit, sequences with long
cached prompts would delay the others."""


@dataclass(frozen=True, slots=True)
class _Refused:
    """The policy's view of the first waiting sequence, which it refused."""

    sequence_id: int
    candidate: Candidate


class Admission:
    """The queue of sequences without a slot, and the admission of sequences from its front."""

    def __init__(
        self, limits: SchedulerLimits, policy: Policy, rows: RowPlanner, counters: EngineCounters
    ) -> None:
        """Start with an empty queue."""
        self._limits = limits
        self._policy = policy
        self._rows = rows
        self._counters = counters
        self._queue = WaitingQueue(policy, rows.sequences.num_running_of)
        self._refused: _Refused | None = None

    @property
    def may_admit(self) -> bool:
        """Whether the next step probably admits a sequence."""
        sequences = self._rows.sequences
        return bool(sequences.has_free_slot and self._refused is None and sequences.num_waiting)

    def push(self, sequence: Sequence) -> None:
        """Add a sequence to the queue."""
        self._queue.push(sequence)

    def find_victim(self) -> int | None:
        """Return the slot to preempt so that tenants get equal shares of the slots, None if no tenant has too many.

        A waiting tenant takes a slot from the one with the most, if that has at least two more. The victim is
        the last sequence of that tenant in the policy's order, unless it ranks before the waiting one.
        """
        sequences = self._rows.sequences
        if sequences.has_free_slot or sequences.num_tenants < 2 or self._first_waiting() is None:
            return None
        entry = self._queue.first()
        assert entry is not None, "a sequence waits"
        tenant = sequences.busiest_tenant()
        if sequences.num_running_of(tenant) < sequences.num_running_of(entry.tenant) + 2:
            return None
        key, victim = max(
            (self._queue.key_of(sequences.at(slot).sequence), slot)
            for slot in sequences.slots_of(tenant)
        )
        return victim if key[0] >= entry.key[0] else None

    def plan(self, builder: StepPlanBuilder, budget: int, *, is_idle: bool) -> None:
        """Admit waiting sequences, with `budget` tokens for their first chunks. `is_idle`: no step is in flight."""
        kv, sequences = self._rows.kv, self._rows.sequences
        skipped: list[QueueEntry] = []
        num_hit_blocks = 0
        while budget > 0 and sequences.has_free_slot and num_hit_blocks < MAX_HIT_BLOCKS:
            state = self._first_waiting()
            if state is None:
                break
            if state.sequence.last_step > kv.pool.last_retired:
                skipped.append(self._queue.pop())  # a token of it is still in flight
                continue
            num_tokens = builder.num_tokens
            num_cached = self._admit(builder, state, self._room(builder, budget, is_idle=is_idle))
            if num_cached is None:
                break
            num_hit_blocks += kv.num_groups * num_cached // kv.block_size
            # Without a planned token the admission still counts, so that the loop ends.
            budget -= max(1, builder.num_tokens - num_tokens)
        for entry in skipped:
            self._queue.put_back(entry)

    def _first_waiting(self) -> Waiting | Preempted | None:
        """Return the first sequence of the queue, after dropping entries of sequences that ended."""
        while (entry := self._queue.first()) is not None:
            state = self._rows.sequences.get(entry.sequence_id)
            if isinstance(state, Waiting | Preempted):
                return state
            self._queue.pop()
        return None

    def _admit(
        self, builder: StepPlanBuilder, state: Waiting | Preempted, room: Room
    ) -> int | None:
        """Give the first waiting sequence a slot, blocks and a chunk, if the policy admits it.

        Returns the number of tokens of its prefix hit, None if the sequence waits on.
        """
        sequence, kv = state.sequence, self._rows.kv
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
            self._counters.admit(sequence, match.num_tokens, has_prefix_cache=kv.has_prefix_cache)
        blocks = kv.acquire(match)
        slot = self._rows.sequences.admit(state, blocks, match.num_tokens)
        builder.add_sequence(slot, sequence, blocks)
        self._rows.plan_chunk(builder, slot, num_tokens)
        return match.num_tokens

    def _is_still_refused(self, sequence: Sequence, room: Room) -> bool:
        """Whether the policy again refuses a sequence that it refused before, given the same prefix hit.

        The hit is not looked up again, because that takes time proportional to the prompt length.
        """
        refused = self._refused
        if refused is None or refused.sequence_id != sequence.sequence_id or room.is_alone:
            return False
        return self._policy.admit(refused.candidate, room) <= 0

    def _room(self, builder: StepPlanBuilder, budget: int, *, is_idle: bool) -> Room:
        limits, rows = self._limits, self._rows
        if not limits.is_chunking and not builder.num_chunk_tokens:
            budget = limits.max_model_len  # a prompt beyond the budget runs alone
        return Room(
            budget,
            limits.is_chunking,
            rows.kv.pool.num_available,
            num_promised_pages(rows.columns, rows.kv),
            len(rows.columns.decoding()),
            is_alone=is_idle and not rows.sequences.num_running,
        )
