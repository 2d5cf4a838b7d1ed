"""The scheduler: requests in, step plans out, step results in, columns of tokens out.

It asks the policy, applies the decision and keeps every sequence in one typed state. A step in which all
rows decode touches no Python object per sequence: everything is a column.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from tokenspeed_core.kv.lease import BlockLease
from tokenspeed_core.kv.manager import KVManager
from tokenspeed_core.messages import Finish, Outputs, Refused, Submit
from tokenspeed_core.scheduler.collect import Collected, collect
from tokenspeed_core.scheduler.lifecycle import (
    Admit,
    AwaitingInput,
    Decoding,
    End,
    Event,
    Finished,
    InputReady,
    Lease,
    Move,
    Preempt,
    Preempted,
    Prefilling,
    PromptPlanned,
    Sending,
    State,
    TransferDone,
    Waiting,
    advance,
)
from tokenspeed_core.scheduler.planning import Draft, InFlight
from tokenspeed_core.scheduler.policy import Candidate, Decision, Limits, Policy, Room, View
from tokenspeed_core.scheduler.rows import Rows
from tokenspeed_core.scheduler.sequence import Sequence
from tokenspeed_core.step import I32, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The scheduler's constants. Sizes are in tokens; `chunk_size` -1 turns chunking off."""

    max_num_seqs: int
    max_model_len: int
    chunk_size: int
    max_prefill_tokens: int
    max_queued: int
    vocab_size: int
    seed: int = 0

    @property
    def is_chunking(self) -> bool:
        """Whether prompts are cut."""
        return self.chunk_size > 0

    @property
    def budget(self) -> int:
        """Query tokens that a step may have (a single prompt may exceed it when chunking is off)."""
        return self.chunk_size if self.is_chunking else self.max_prefill_tokens

    @property
    def max_num_tokens(self) -> int:
        """The most query tokens that any step can have."""
        whole = self.budget if self.is_chunking else max(self.budget, self.max_model_len)
        return max(whole, self.max_num_seqs) if self.is_chunking else whole + self.max_num_seqs


Drafts = Callable[[I32, I32], I32]  # (slots, most drafts each) -> drafts each


class Scheduler:
    """Plans steps and applies their results. Knows no tensor, no text and no socket."""

    def __init__(
        self, limits: SchedulerLimits, kv: KVManager, policy: Policy, *,
        drafts: Drafts | None = None, sends: Callable[[Sequence], bool] | None = None,
    ) -> None:
        """Start empty. `drafts` gives decode rows drafts to verify; `sends` says whose blocks a transfer needs."""
        self.limits, self.kv, self.policy = limits, kv, policy
        self.rows = Rows(limits.max_num_seqs, limits.max_model_len)
        self.num_preemptions = 0
        self._drafts, self._sends = drafts, sends
        self._states: dict[int, State] = {}
        self._waiting: list[tuple[tuple[int, int], int]] = []   # heap of (policy key, sequence id)
        self._num_waiting = 0
        self._leases: list[BlockLease | None] = [None] * limits.max_num_seqs
        self._slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._in_flight: deque[InFlight] = deque()
        self._next_step, self._retired = 1, 0
        self._num_arrivals = 0
        self._stuck_at = -1     # pages available when the first in the queue last found no room
        self._random = np.random.default_rng(limits.seed)

    # -- requests -------------------------------------------------------------------------------------

    def submit(self, request: Submit, *, awaits: str | None = None) -> Refused | None:
        """Take a request, or say why not. With `awaits`, it waits for `input_ready` first."""
        refused = self._refusal(request)
        if refused is not None:
            return refused
        chain = self.kv.chain(request.cache_salt, 0)
        chain.extend(request.prompt)
        seed = int(self._random.integers(2**62)) if request.seed is None else request.seed
        for i in range(request.n):
            self._num_arrivals += 1
            sequence = Sequence(
                request.request_id + i, request, seed + i, self._num_arrivals,
                chain.fork() if request.n > 1 else chain, request.prompt,
            )
            self._num_waiting += 1
            if awaits is not None:
                self._states[sequence.sequence_id] = AwaitingInput(sequence, awaits)
            else:
                self._states[sequence.sequence_id] = Waiting(sequence)
                self._enqueue(sequence)
        return None

    def input_ready(self, sequence_id: int) -> None:
        """Say that what a sequence waited for is there. Unknown ids are ignored: it may have been aborted."""
        state = self._states.get(sequence_id)
        if isinstance(state, AwaitingInput):
            self._move(state, InputReady())
            self._enqueue(state.sequence)

    def transfer_done(self, sequence_id: int) -> None:
        """Say that a finished sequence's blocks are no longer needed."""
        state = self._states.get(sequence_id)
        if isinstance(state, Sending):
            self._move(state, TransferDone())

    def abort(self, sequence_ids: Iterable[int]) -> None:
        """Stop planning sequences at once. Unknown ids, and those that have finished, are ignored."""
        for sequence_id in sequence_ids:
            state = self._states.get(int(sequence_id))
            if state is not None and not isinstance(state, Sending):
                self._end(state, Finish.ABORT)

    def state(self, sequence_id: int) -> State | None:
        """Return a sequence's state; None when it is over or was never here."""
        return self._states.get(sequence_id)

    def sending(self) -> list[int]:
        """Return the sequences whose blocks wait for a transfer."""
        return [key for key, state in self._states.items() if isinstance(state, Sending)]

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return self.limits.max_num_seqs - len(self._slots)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot or for input."""
        return self._num_waiting

    @property
    def num_in_flight(self) -> int:
        """Steps launched and not yet applied."""
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """Whether a plan may come out, now or when what is in flight is over."""
        return bool(self.num_running or self._waiting or self._in_flight)

    # -- planning -------------------------------------------------------------------------------------

    def plan(self, max_chunk: int | None = None) -> Draft | None:
        """Decide the next step. Returns None when nothing can run now. Follow with `launched`.

        `max_chunk` bounds a prompt's tokens while others decode.
        """
        draft = Draft(self._next_step, self.rows, len(self.kv.groups))
        self.kv.begin(draft.step_id)
        budget = self.limits.budget
        if self.num_running:
            budget -= self._plan_running(draft, budget, max_chunk)
        if self._slots and self._waiting and budget > 0:
            self._admit_waiting(draft, budget, max_chunk)
        if draft.is_empty:
            if not self.has_work:
                self.kv.drop_copies()
            return None
        return draft

    def launched(self, draft: Draft, group_num_tokens: I32 | None = None) -> StepPlan:
        """Freeze a draft into the plan that the runner gets, and note that it is on its way."""
        plan = draft.freeze(self.kv.copies(), group_num_tokens)
        self.kv.launch(plan.step_id)
        self.rows.last_step[plan.slots] = plan.step_id
        self._in_flight.append(InFlight(plan, self.rows.sequence_id[plan.slots], draft.num_new()))
        self._next_step += 1
        return plan

    def empty(self) -> Draft:
        """Return a draft without rows, which the step group needs of an idle replica."""
        draft = Draft(self._next_step, self.rows, len(self.kv.groups))
        self.kv.begin(draft.step_id)
        return draft

    def _plan_running(self, draft: Draft, budget: int, max_chunk: int | None) -> int:
        view, counts = self._view(), self.kv.counts()
        chunk = self._chunk(view.num_decodes, max_chunk)
        limits = Limits(budget, chunk, self.limits.is_chunking, counts.free + counts.cached, counts.fenced)
        decision = self.policy.decide(view, limits)
        for victim in decision.victims:
            self._preempt(int(view.slots[victim]))
        self._apply_decodes(draft, view, decision)
        for i in range(view.num_decodes, len(view.slots)):
            if decision.num_query[i]:
                self._plan_chunk(draft, int(view.slots[i]), int(decision.num_query[i]))
        return draft.num_tokens

    def _chunk(self, num_decodes: int, max_chunk: int | None) -> int:
        return max_chunk if max_chunk is not None and num_decodes else self.limits.budget

    def _view(self) -> View:
        """Gather the rows that want to run."""
        rows, kv = self.rows, self.kv
        decoding = rows.decoding()
        bound = rows.num_bound[decoding]
        room = rows.max_len[decoding] - bound
        able = room > 0
        if not able.all():
            decoding, room, bound = decoding[able], room[able], bound[able]
        num_query = np.ones(len(decoding), np.int32)
        if self._drafts is not None and len(decoding):
            num_query += self._drafts(decoding, room - 1)
        prefilling = rows.prefilling()
        if len(prefilling):
            slots = np.concatenate((decoding, prefilling))
            rest = rows.target[prefilling] - rows.num_planned[prefilling]
            end = np.concatenate((bound - 1 + num_query, rows.num_planned[prefilling] + 1))
            wanted = np.concatenate((num_query, rest))
        else:
            slots, wanted, end = decoding, num_query, bound - 1 + num_query
        short = end - rows.capacity[slots]
        pages = np.maximum(-(-short // kv.block_size), 0) * self._pages_per_block
        held = np.zeros(len(slots), np.int32)
        if int(pages.sum()) > kv.pool.num_available:
            held = np.asarray([self._num_pages(int(slot)) for slot in slots], np.int32)
        return View(slots, len(decoding), wanted, pages, held, rows.priority[slots], rows.arrival[slots])

    @property
    def _pages_per_block(self) -> int:
        return sum(not group.is_recurrent for group in self.kv.groups)

    def _num_pages(self, slot: int) -> int:
        lease = self._leases[slot]
        return len(lease.pages()) if lease is not None else 0

    def _apply_decodes(self, draft: Draft, view: View, decision: Decision) -> None:
        rows, num = self.rows, view.num_decodes
        slots, num_query = view.slots[:num], decision.num_query[:num]
        runs = num_query > 0
        if not runs.all():
            slots, num_query = slots[runs], num_query[runs]
        start = rows.num_bound[slots] - 1
        for i in np.flatnonzero(start + num_query > rows.capacity[slots]):
            # Drafts may be rejected: only the tokens that the host has seen are certainly there.
            certain = int(rows.num_known[slots[i]]) - 1
            has_room = self._extend(draft, int(slots[i]), certain, int(start[i] + num_query[i]))
            assert has_room, "the policy let a row run without pages"
        rows.num_bound[slots] += num_query
        draft.decodes(slots, num_query, start)

    def _plan_chunk(self, draft: Draft, slot: int, num_tokens: int) -> None:
        """Plan the next `num_tokens` known tokens of a slot, or as many as there are pages for."""
        rows, kv = self.rows, self.kv
        start, target = int(rows.num_planned[slot]), int(rows.target[slot])
        fits = int(rows.capacity[slot]) + kv.pool.num_available // max(1, self._pages_per_block) * kv.block_size
        end = min(start + num_tokens, fits)
        aligned = end // kv.block_size * kv.block_size
        if kv.has_recurrent and aligned > start and (end < target or aligned < target):
            end = aligned  # a state can be kept only where a block ends
        if end <= start or not self._extend(draft, slot, start, end):
            return
        is_last = end == target
        sequence_id = int(rows.sequence_id[slot])
        state = self._states[sequence_id]
        assert isinstance(state, Prefilling)
        draft.chunk(slot, start, end, is_last)
        rows.num_planned[slot] = end
        kv.name_blocks(state.lease.blocks, state.sequence.chain, end, is_exact=True)
        if is_last:
            rows.num_bound[slot] = target + 1
            rows.named_until[slot] = state.lease.blocks.num_named
            rows.set_decoding(slot, True)
            self._move(state, PromptPlanned())

    def _extend(self, draft: Draft, slot: int, start: int, end: int) -> bool:
        lease = self._leases[slot]
        assert lease is not None
        growth = self.kv.extend(lease, start, end)
        if growth is None:
            return False
        self.rows.capacity[slot] = lease.capacity
        draft.grow(slot, growth.entries)
        return True

    # -- admission and preemption -----------------------------------------------------------------------

    def _admit_waiting(self, draft: Draft, budget: int, max_chunk: int | None) -> None:
        late: list[tuple[tuple[int, int], int]] = []
        while self._slots and self._waiting and budget > 0:
            if 0 <= self.kv.pool.num_available <= self._stuck_at and self.num_running:
                break
            entry = self._waiting[0]
            state = self._states.get(entry[1])
            if not isinstance(state, Waiting | Preempted):
                heapq.heappop(self._waiting)
                continue
            if state.sequence.last_step > self._retired:
                late.append(heapq.heappop(self._waiting))  # a token of it is still in flight
                continue
            spent = self._admit(draft, state, budget, max_chunk)
            if not spent:
                break
            heapq.heappop(self._waiting)
            budget -= spent
        for entry in late:
            heapq.heappush(self._waiting, entry)

    def _admit(self, draft: Draft, state: Waiting | Preempted, budget: int, max_chunk: int | None) -> int:
        """Give the next sequence a slot, blocks and its first chunk. Returns the tokens planned; 0: no room."""
        sequence, kv = state.sequence, self.kv
        sequence.chain.extend(sequence.tokens)
        match = kv.match(sequence.chain, len(sequence.tokens))
        candidate = Candidate(
            len(sequence.tokens), match.num_tokens,
            kv.pages_needed(match.num_tokens, min(len(sequence.tokens) + 1, sequence.max_len)), match.num_idle,
        )
        num_tokens = self.policy.admit(candidate, self._room(draft, budget, max_chunk))
        lease = kv.acquire(match) if num_tokens else None
        if lease is None:
            self._stuck_at = kv.pool.num_available
            return 0
        self._stuck_at = -1
        slot = self._slots.pop()
        self._leases[slot] = lease
        self.rows.occupy(slot, sequence, match.num_tokens, lease.capacity)
        self._num_waiting -= 1
        self._move(state, Admit(Lease(slot, lease)))
        draft.occupy(slot, sequence, lease)
        before = draft.num_tokens
        self._plan_chunk(draft, slot, num_tokens)
        return max(1, draft.num_tokens - before)

    def _room(self, draft: Draft, budget: int, max_chunk: int | None) -> Room:
        rows, counts = self.rows, self.kv.counts()
        prefilling = rows.prefilling()
        short = rows.target[prefilling] + 1 - rows.capacity[prefilling]
        promised = int(np.maximum(-(-short // self.kv.block_size), 0).sum()) * self._pages_per_block
        num_decoding = len(rows.decoding())
        if not self.limits.is_chunking and not draft.num_chunks:
            budget = self.limits.max_model_len  # a prompt beyond the budget runs alone
        return Room(
            budget, self._chunk(num_decoding, max_chunk), self.limits.is_chunking,
            counts.free + counts.cached, promised, num_decoding,
            is_alone=not self.num_running and not self._in_flight and not counts.fenced,
        )

    def _preempt(self, slot: int) -> None:
        state = self._states[int(self.rows.sequence_id[slot])]
        self.num_preemptions += 1
        self._name_known(slot)
        self._move(state, Preempt())
        self._num_waiting += 1
        self._enqueue(state.sequence)

    # -- results --------------------------------------------------------------------------------------

    def apply(self, result: StepResult) -> Outputs:
        """Take in the oldest step's result and return what its sequences got."""
        flight = self._in_flight.popleft()
        assert flight.plan.step_id == result.step_id, "results come in the order of the plans"
        self._retired = result.step_id
        self.kv.retire(result.step_id)
        collected = collect(self.rows, flight, result)
        self._late_tokens(flight, collected)
        for slot in collected.due_for_naming(self.rows, self.kv.block_size):
            self._name_known(int(slot))
        for slot, reason in collected.ended():
            self._end(self._states[int(self.rows.sequence_id[slot])], reason)
        return collected.outputs()

    def fail(self, step_id: int) -> list[int]:
        """End every sequence of a failed step and those after it, with an error; return their ids."""
        self.kv.withdraw(step_id)
        failed: list[int] = []
        while self._in_flight:
            flight = self._in_flight.popleft()
            self._retired = flight.plan.step_id
            for sequence_id in flight.sequence_ids:
                state = self._states.get(int(sequence_id))
                if state is not None and not isinstance(state, Sending):
                    self._end(state, Finish.ERROR)
                    failed.append(int(sequence_id))
        self.kv.retire(self._retired)
        return failed

    def _late_tokens(self, flight: InFlight, collected: Collected) -> None:
        """Hand tokens to sequences that lost their slot while the step ran, and end those that are complete."""
        for row, tokens in collected.homeless():
            sequence_id = int(flight.sequence_ids[row])
            state = self._states.get(sequence_id)
            if not isinstance(state, Preempted):
                continue
            for token in tokens:
                state.sequence.append(int(token))
                reason = _end_reason(state.sequence, int(token))
                collected.add_late(row, sequence_id, int(token), reason)
                if reason is not Finish.NOT:
                    self._end(state, reason)
                    break

    def _name_known(self, slot: int) -> None:
        """Make the blocks that are computed and whose tokens are known shareable."""
        state = self._states[int(self.rows.sequence_id[slot])]
        if isinstance(state, Decoding):
            known = self.rows.known(slot)
            state.sequence.chain.extend(known)
            self.kv.name_blocks(state.lease.blocks, state.sequence.chain, len(known) - 1, is_exact=False)
            self.rows.named_until[slot] = state.lease.blocks.num_named

    # -- states ---------------------------------------------------------------------------------------

    def _end(self, state: State, reason: Finish) -> None:
        if isinstance(state, Decoding):
            self._name_known(state.lease.slot)
        if isinstance(state, Waiting | Preempted | AwaitingInput):
            self._num_waiting -= 1
        sends = self._sends is not None and reason in (Finish.STOP, Finish.LENGTH) and self._sends(state.sequence)
        self._move(state, End(reason, sends and isinstance(state, Prefilling | Decoding)))

    def _move(self, state: State, event: Event) -> None:
        move: Move = advance(state, event)
        if move.slot is not None:
            self.rows.vacate(move.slot, move.state.sequence)
            self._leases[move.slot] = None
            self._slots.append(move.slot)
        if move.blocks is not None:
            self.kv.release(move.blocks)
        if isinstance(move.state, Finished):
            del self._states[move.state.sequence.sequence_id]
        else:
            self._states[move.state.sequence.sequence_id] = move.state

    def _enqueue(self, sequence: Sequence) -> None:
        key = self.policy.key(sequence.request.priority, sequence.arrival)
        heapq.heappush(self._waiting, (key, sequence.sequence_id))
        self._stuck_at = -1

    def _refusal(self, request: Submit) -> Refused | None:
        limits, num_prompt = self.limits, len(request.prompt)
        most = min(limits.max_model_len, self.kv.most_tokens())
        if not num_prompt or request.prompt.min() < 0 or request.prompt.max() >= limits.vocab_size:
            what = f"token ids must lie in [0, {limits.vocab_size})" if num_prompt else "the prompt is empty"
            return Refused(request.request_id, "bad_request", what)
        if num_prompt + request.max_tokens > most or request.max_tokens < 1:
            return Refused(
                request.request_id, "too_long",
                f"{num_prompt} prompt tokens and {request.max_tokens} to generate exceed the {most} that fit",
            )
        if request.n > limits.max_queued - self._num_waiting:
            message = f"{self._num_waiting} sequences wait already; the queue takes {limits.max_queued}"
            return Refused(request.request_id, "queue_full", message)
        return None


def _end_reason(sequence: Sequence, token: int) -> Finish:
    if token < 0:
        return Finish.ERROR
    if token in sequence.request.stop_token_ids:
        return Finish.STOP
    return Finish.LENGTH if len(sequence.tokens) >= sequence.max_len else Finish.NOT
