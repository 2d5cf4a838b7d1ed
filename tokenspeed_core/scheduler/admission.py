"""Admission: what is refused at the door, and how those who wait get a slot, blocks and a first chunk."""

from __future__ import annotations

import numpy as np

from tokenspeed_core.api.policy import Candidate, Policy, Room
from tokenspeed_core.engine.messages import Rejected, Submit
from tokenspeed_core.kv_cache.manager import KVManager, Match
from tokenspeed_core.scheduler.columns import SlotColumns
from tokenspeed_core.scheduler.lifecycle import Preempted, Waiting
from tokenspeed_core.scheduler.limits import SchedulerLimits
from tokenspeed_core.scheduler.running import Running
from tokenspeed_core.scheduler.sequence import Sequence
from tokenspeed_core.scheduler.sequence_table import Entry, SequenceTable
from tokenspeed_core.scheduler.step_plan_builder import StepPlanBuilder


class Admission:
    """Admits the first of the queue, one after another, while the policy finds room for them."""

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVManager,
        policy: Policy,
        columns: SlotColumns,
        roster: SequenceTable,
        running: Running,
    ) -> None:
        """Share the scheduler's parts."""
        self._limits, self._kv, self._policy = limits, kv, policy
        self._columns, self._roster, self._running = columns, roster, running

    def refusal(self, request: Submit) -> Rejected | None:
        """Say why a request can never run or may not queue; None if it may. Changes nothing."""
        limits, num_prompt, num_waiting = (
            self._limits,
            len(request.prompt),
            self._roster.num_waiting,
        )
        most = min(limits.max_model_len, self._kv.max_tokens_in_pool())
        if not num_prompt or request.prompt.min() < 0 or request.prompt.max() >= limits.vocab_size:
            what = (
                f"token ids must lie in [0, {limits.vocab_size})"
                if num_prompt
                else "the prompt is empty"
            )
            return Rejected(request.request_id, "bad_request", what)
        if num_prompt + request.max_tokens > most or request.max_tokens < 1:
            return Rejected(
                request.request_id,
                "too_long",
                f"{num_prompt} prompt tokens and {request.max_tokens} to generate exceed the {most} that fit",
            )
        if request.n > limits.max_queued:
            message = f"n is {request.n}, and the queue never takes more than {limits.max_queued} sequences"
            return Rejected(request.request_id, "bad_request", message)
        if request.n > limits.max_queued - num_waiting:
            message = f"{num_waiting} sequences wait already; the queue takes {limits.max_queued}"
            return Rejected(request.request_id, "queue_full", message)
        return None

    def plan(self, draft: StepPlanBuilder, budget: int, num_in_flight: int) -> None:
        """Admit those who wait, with `budget` tokens for their first chunks."""
        roster = self._roster
        late: list[Entry] = []
        while budget > 0 and roster.can_admit:
            state = roster.first()
            if state is None:
                break
            if state.sequence.last_step > self._kv.pool.retired:
                late.append(roster.pop())  # a token of it is still in flight
                continue
            spent = self._admit(draft, state, self._room(draft, budget, num_in_flight))
            if not spent:
                break
            budget -= spent
        for entry in late:
            roster.put_back(entry)

    def _admit(self, draft: StepPlanBuilder, state: Waiting | Preempted, room: Room) -> int:
        """Give the first its slot, blocks and first chunk. Returns the tokens planned; 0: no room."""
        sequence, kv = state.sequence, self._kv
        sequence.chain.extend(sequence.tokens)
        match = kv.match(sequence.chain, len(sequence.tokens))
        candidate = self._candidate(sequence, match)
        num_tokens = min(self._policy.admit(candidate, room), room.token_budget)
        if not num_tokens and room.is_alone:
            # A state's checkpoint takes a block until it is copied, and that may be the one block too many.
            match = kv.no_match()
            candidate = self._candidate(sequence, match)
            num_tokens = min(self._policy.admit(candidate, room), room.token_budget)
        lease = kv.acquire(match) if num_tokens else None
        if lease is None:
            # The policy may say yes in the next step unless blocks are missing.
            if candidate.num_new_blocks + candidate.num_idle_blocks > room.num_available_blocks:
                self._roster.stuck()
            return 0
        self._roster.pop()
        slot = self._roster.admit(state, lease, match.num_tokens)
        draft.occupy(slot, sequence, lease)
        before = draft.num_tokens
        self._running.plan_chunk(draft, slot, num_tokens)
        return max(1, draft.num_tokens - before)

    def _candidate(self, sequence: Sequence, match: Match) -> Candidate:
        num_tokens = len(sequence.tokens)
        blocks = self._kv.blocks_needed(match.num_tokens, min(num_tokens + 1, sequence.max_len))
        return Candidate(num_tokens, match.num_tokens, blocks, match.num_idle)

    def _room(self, draft: StepPlanBuilder, budget: int, num_in_flight: int) -> Room:
        columns, kv, counts = self._columns, self._kv, self._kv.counts()
        prefilling = columns.prefilling()
        short = columns.target[prefilling] + 1 - columns.capacity[prefilling]
        promised = int(np.maximum(-(-short // kv.block_size), 0).sum()) * kv.num_token_groups
        num_decoding = len(columns.decoding())
        if not self._limits.is_chunking and not draft.num_chunk_tokens:
            budget = self._limits.max_model_len  # a prompt beyond the budget runs alone
        return Room(
            budget,
            self._limits.is_chunking,
            counts.free + counts.cached,
            promised,
            num_decoding,
            is_alone=not self._roster.num_running and not num_in_flight and not counts.pending,
        )
