"""The scheduler: requests in, step plans out, step results in, columns of tokens out.

It asks the policy, applies the decision and keeps every sequence in one typed state. Running sequences are
planned in `running.py`, waiting ones in `admission.py`; `roster.py` keeps the states.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from tokenspeed_core.api.policy import Policy
from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.api.step import I32, StepPlan, StepResult
from tokenspeed_core.engine.messages import Outputs, Rejected, Submit
from tokenspeed_core.errors import EngineDeadError
from tokenspeed_core.kv_cache.manager import KVManager
from tokenspeed_core.scheduler.admission import Admission
from tokenspeed_core.scheduler.collect import Collected, collect
from tokenspeed_core.scheduler.columns import SlotColumns
from tokenspeed_core.scheduler.lifecycle import (
    AwaitingInput,
    Preempted,
    Sending,
    State,
    TransferDone,
)
from tokenspeed_core.scheduler.limits import SchedulerLimits
from tokenspeed_core.scheduler.running import Drafts, Running
from tokenspeed_core.scheduler.sequence import Sequence
from tokenspeed_core.scheduler.sequence_table import SequenceTable
from tokenspeed_core.scheduler.step_plan_builder import InFlight, StepPlanBuilder


class Scheduler:
    """Plans steps and applies their results. Knows no tensor, no text and no socket."""

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVManager,
        policy: Policy,
        *,
        drafts: Drafts | None = None,
        sends: Callable[[Sequence], bool] | None = None,
    ) -> None:
        """Start empty. `drafts` gives decode rows drafts to verify; `sends` says whose blocks a transfer needs."""
        self.limits, self.kv, self.policy = limits, kv, policy
        self.columns = SlotColumns(limits.max_num_seqs, limits.max_model_len)
        self.roster = SequenceTable(self.columns, kv, policy)
        self._running = Running(limits, kv, policy, self.columns, self.roster, drafts)
        self._admission = Admission(limits, kv, policy, self.columns, self.roster, self._running)
        self._sends = sends
        self._in_flight: deque[InFlight] = deque()
        self._next_step = 1
        self._num_arrivals = 0
        self._random = np.random.default_rng(limits.seed)

    # -- requests -------------------------------------------------------------------------------------

    def submit(self, request: Submit, *, awaits: str | None = None) -> Rejected | None:
        """Take a request, or say why not. With `awaits`, it waits for `input_ready` first."""
        refused = self._admission.refusal(request)
        if refused is not None:
            return refused
        chain = self.kv.chain(request.cache_salt, 0)
        if request.n > 1:
            chain.extend(
                request.prompt
            )  # once for all; one that is alone is hashed when it is its turn
        seed = int(self._random.integers(2**62)) if request.seed is None else request.seed
        for i in range(request.n):
            self._num_arrivals += 1
            self.roster.add(
                Sequence(
                    request.request_id + i,
                    request,
                    seed + i,
                    self._num_arrivals,
                    chain.fork() if request.n > 1 else chain,
                    request.prompt,
                ),
                awaits,
            )
        return None

    def input_ready(self, sequence_id: int) -> None:
        """Say that what a sequence waited for is there. Unknown ids are ignored: it may have been aborted."""
        state = self.roster.get(sequence_id)
        if isinstance(state, AwaitingInput):
            self.roster.input_ready(state)

    def transfer_done(self, sequence_id: int) -> None:
        """Say that a finished sequence's blocks are no longer needed."""
        state = self.roster.get(sequence_id)
        if isinstance(state, Sending):
            self.roster.move(state, TransferDone())

    def abort(self, sequence_ids: Iterable[int]) -> None:
        """Stop planning sequences at once. Unknown ids, and those that have finished, are ignored."""
        for sequence_id in sequence_ids:
            state = self.roster.get(int(sequence_id))
            if state is not None and not isinstance(state, Sending):
                self.roster.end(state, FinishReason.ABORT)

    @property
    def num_in_flight(self) -> int:
        """Steps launched and not yet applied."""
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """Whether a plan may come out, now or when what is in flight is over."""
        return bool(self.roster.num_running or self.roster.has_candidates or self._in_flight)

    # -- planning -------------------------------------------------------------------------------------

    def plan(self, max_prefill: int | None = None) -> StepPlanBuilder | None:
        """Decide the next step. Returns None when nothing can run now. Follow with `launched`.

        `max_prefill` bounds the prompt tokens of the step, where prompts are cut. Raises EngineDeadError
        if the policy runs nothing although nothing is in flight, since no later step would change that.
        """
        num_preemptions = self.roster.num_preemptions
        draft, budget = self.empty(), self.limits.token_budget
        most = budget if max_prefill is None or not self.limits.is_chunking else max_prefill
        if self.roster.num_running:
            self._running.plan(draft, budget, most)
        left = min(budget - draft.num_tokens, most - draft.num_chunk_tokens)
        self._admission.plan(draft, left, self.num_in_flight)
        if draft.is_empty:
            if not self._in_flight:
                # No step will carry the copies, and they may hold the blocks that a sequence needs.
                has_dropped = self.kv.drop_copies()
                if not has_dropped and num_preemptions == self.roster.num_preemptions:
                    self._check_progress()
            return None
        return draft

    def _check_progress(self) -> None:
        num_running, num_waiting = self.roster.num_running, self.roster.num_waiting
        if num_running or self.roster.has_candidates:
            raise EngineDeadError(
                f"the scheduling policy {self.policy} ran none of {num_running} running and "
                f"{num_waiting} waiting sequences while no step was in flight. "
                "Choose another --schedule-policy."
            )

    def empty(self) -> StepPlanBuilder:
        """Return a draft without rows, which the step group needs of an idle replica."""
        draft = StepPlanBuilder(self._next_step, self.columns, len(self.kv.groups))
        self.kv.begin(draft.step_id)
        return draft

    def launched(self, draft: StepPlanBuilder, group_num_tokens: I32 | None = None) -> StepPlan:
        """Freeze a draft into the plan that the runner gets, and note that it is on its way."""
        plan = draft.freeze(self.kv.copies(), group_num_tokens)
        self.kv.launch(plan.step_id)
        self.columns.last_step[plan.slots] = plan.step_id
        self._in_flight.append(
            InFlight(plan, self.columns.sequence_id[plan.slots], draft.num_new())
        )
        self._next_step += 1
        return plan

    # -- results --------------------------------------------------------------------------------------

    def apply(self, result: StepResult) -> Outputs:
        """Take in the oldest step's result and return what its sequences got."""
        flight = self._in_flight.popleft()
        assert flight.plan.step_id == result.step_id, "results come in the order of the plans"
        self.kv.retire(result.step_id)
        collected = collect(self.columns, flight, result)
        self._late_tokens(flight, collected)
        for slot in collected.due_for_naming(self.columns, self.kv.granularity):
            self.roster.name_known(int(slot))
        for slot, reason in collected.ended():
            self._end(self.roster.at(slot), reason)
        if not self.has_work:
            self.kv.drop_copies()  # no step will carry them: nothing is held when idle
        return collected.outputs()

    def fail(self, step_id: int) -> list[int]:
        """End every sequence of a failed step and those after it, with an error; return their ids."""
        self.kv.withdraw(step_id)
        failed, last = list[int](), self.kv.pool.retired
        while self._in_flight:
            flight = self._in_flight.popleft()
            last = flight.plan.step_id
            for sequence_id in flight.sequence_ids.tolist():
                state = self.roster.get(sequence_id)
                if state is not None and not isinstance(state, Sending):
                    self._end(state, FinishReason.ERROR)
                    failed.append(sequence_id)
        self.kv.retire(last)
        return failed

    def _late_tokens(self, flight: InFlight, collected: Collected) -> None:
        """Hand tokens to sequences that lost their slot while the step ran, and end those that are complete."""
        for row, tokens in collected.homeless():
            sequence_id = int(flight.sequence_ids[row])
            state = self.roster.get(sequence_id)
            if not isinstance(state, Preempted):
                continue
            sequence = state.sequence
            for token in tokens.tolist():
                num_cached = (
                    sequence.num_cached if len(sequence.tokens) == sequence.num_prompt else 0
                )
                if token >= 0:
                    sequence.append(token)
                reason = _end_reason(sequence, token)
                collected.add_late(row, sequence_id, token, reason, num_cached)
                if reason is not FinishReason.NOT:
                    self._end(state, reason)
                    break

    def _end(self, state: State, reason: FinishReason) -> None:
        sends = (
            self._sends is not None
            and reason in (FinishReason.STOP, FinishReason.LENGTH)
            and self._sends(state.sequence)
        )
        self.roster.end(state, reason, sends=sends)


def _end_reason(sequence: Sequence, token: int) -> FinishReason:
    if token < 0:
        return FinishReason.ERROR
    if token in sequence.request.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(sequence.tokens) >= sequence.max_len else FinishReason.NOT
