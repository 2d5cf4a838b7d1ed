"""The scheduler: turns requests into step plans, and step results into tokens of sequences.

The scheduler asks the policy, applies its decision, and keeps every sequence in one typed state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from tokenspeed_core.api.policy import Limits, Policy
from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.api.step import I32, I64, StepResult
from tokenspeed_core.engine.messages import Outputs, Rejected, Submit
from tokenspeed_core.errors import EngineDeadError
from tokenspeed_core.kv_cache.manager import KVManager
from tokenspeed_core.scheduler.admission import Admission
from tokenspeed_core.scheduler.collect import (
    AppliedStep,
    Collected,
    NewTokens,
    StepInFlight,
    append_tokens,
    collect,
    make_outputs,
    num_kept,
    prompt_logprobs,
    rows_without_slot,
)
from tokenspeed_core.scheduler.columns import SlotColumns
from tokenspeed_core.scheduler.counters import EngineCounters
from tokenspeed_core.scheduler.drafts import DraftSource, FinishedStep
from tokenspeed_core.scheduler.lifecycle import Preempted
from tokenspeed_core.scheduler.limits import SchedulerLimits
from tokenspeed_core.scheduler.rejections import why_rejected
from tokenspeed_core.scheduler.rows import RowPlanner
from tokenspeed_core.scheduler.sequence import Sequence
from tokenspeed_core.scheduler.sequence_table import SequenceTable
from tokenspeed_core.scheduler.step_plan_builder import StepPlanBuilder
from tokenspeed_core.scheduler.views import view_of_running

# Blocks of ended sequences that a step releases. A block takes about a microsecond, so without a limit, the end of
# sequences with long prompts would delay the others.
MAX_RELEASED_BLOCKS = 16_384


class Scheduler:
    """Plans steps and applies their results. Knows no tensors, text or sockets.

    The cycle of a step: `plan`, `launch`, and, when the runner has the result, `apply` or `fail`. Several steps may
    be in flight; results are applied in the order of the launches. `finish_applied` does the work of applied steps that
    the next plan does not need.
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
        self.sequences.on_release = self._before_release
        self.in_flight: deque[StepInFlight] = deque()
        self._applied: deque[AppliedStep] = deque()
        self.num_preemptions = 0
        self.counters = EngineCounters()
        self.drafts: DraftSource | None = None  # gives decode rows draft tokens to verify
        self._drafts_with_prompts = True
        # Plain steps that the source of draft tokens need not see: the next ones, and those of which it does not know.
        self._num_to_pass = self._num_passed = 0
        self._policy = policy
        self._rows = RowPlanner(
            self.columns, kv, self.sequences, whole_prompts=limits.whole_prompts
        )
        self._admission = Admission(limits, policy, self._rows, self.counters)
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
        self._drafts_with_prompts = with_prompts

    def wants_results(self) -> bool:
        """Return whether to collect all steps in flight before the next one is planned, for its draft tokens."""
        if self.drafts is None or self._num_to_pass or self.drafts.is_paused:
            return False
        drafts = self._drafts_of_next_step
        return drafts is not None and drafts.wants_results()

    @property
    def _drafts_of_next_step(self) -> DraftSource | None:
        """The source of draft tokens, if the next step may have some."""
        drafts = self.drafts
        if drafts is None or not drafts.is_on:
            return None
        if not self._drafts_with_prompts and (
            self._admission.may_admit or len(self.columns.prefilling())
        ):
            return None
        return drafts

    # -- requests -------------------------------------------------------------------------------------

    def submit(
        self, request: Submit, make_grammar: Callable[[], object] | None = None
    ) -> Rejected | None:
        """Queue the sequences of a request, or return why it is rejected. `InputProcessor` has checked its values.

        `make_grammar` returns what the late source keeps for each sequence; see `Sequence.grammar`.
        """
        rejected = self.why_rejected(request)
        if rejected is not None:
            return rejected
        chain = self.kv.chain(request.cache_namespace, 0)
        if request.n > 1:  # shared by all sequences; a single one is hashed at admission
            chain.extend(request.prompt)
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
            self._admission.push(sequence)
        return None

    def abort(self, sequence_ids: Iterable[int]) -> None:
        """Abort sequences immediately. Unknown and finished ids are ignored."""
        for sequence_id in sequence_ids:
            state = self.sequences.get(int(sequence_id))
            if state is not None:
                self.sequences.end(state, FinishReason.ABORT)

    def preempt(self, slot: int) -> None:
        """Preempt a running sequence: free its slot, release its blocks, and queue it again."""
        self.num_preemptions += 1
        self._admission.push(self.sequences.preempt(slot))

    def why_rejected(self, request: Submit, num_held: int = 0) -> Rejected | None:
        """Return why a request cannot be queued, if so. `num_held` sequences wait outside the queue."""
        max_len = min(self.limits.max_model_len, self.kv.max_sequence_len)
        return why_rejected(request, self.limits, self.sequences, max_len, num_held)

    # -- planning -------------------------------------------------------------------------------------

    def plan(self, max_prefill_tokens: int | None = None) -> StepPlanBuilder | None:
        """Decide the next step; None if nothing can run now. Call `launch` with the result.

        `max_prefill_tokens` bounds the prompt tokens of the step if chunked prefill is on. Raises EngineDeadError if
        the policy runs nothing although no step is in flight, since no later step would change that.
        """
        if self._plan_needs_index:
            self.finish_applied()
        builder = StepPlanBuilder(self._next_step, self.columns, self.kv.num_groups)
        self.kv.begin(builder.step_id)
        if self.kv.num_unreleased:
            self._release_ended()
        budget = self.limits.token_budget
        if max_prefill_tokens is None or not self.limits.is_chunking:
            max_prefill_tokens = budget
        num_preemptions = self.num_preemptions
        victim = self._admission.find_victim()
        if victim is not None:
            self.preempt(victim)
        if self.sequences.num_running:
            self._plan_running(builder, max_prefill_tokens)
        left = min(
            budget - builder.num_tokens,
            max_prefill_tokens - builder.num_chunk_tokens,
        )
        self._admission.plan(builder, left, is_idle=not self.in_flight)
        if not builder.is_empty:
            drafts, has_prompts = self.drafts, builder.num_chunk_tokens > 0
            if drafts is not None and drafts.has_model and (has_prompts or not drafts.is_idle):
                self._rows.plan_next_drafts(builder, drafts, with_prompts=self._drafts_with_prompts)
            return builder
        if self.num_preemptions == num_preemptions:
            self._check_progress()
        return None

    @property
    def _plan_needs_index(self) -> bool:
        """Whether the next plan may look up the prefix index, or drop full blocks that are to be added to it."""
        sequences = self.sequences
        return self.kv.has_windows or (sequences.has_free_slot and sequences.num_waiting > 0)

    def _release_ended(self) -> None:
        """Release blocks of ended sequences: some, or as many as the next step may need."""
        limits, min_available = self.limits, 0
        if self.sequences.num_running:
            num_blocks = 2 * limits.max_num_seqs + limits.max_num_tokens // self.kv.block_size
            min_available = num_blocks * self.kv.num_groups
        elif self.sequences.num_waiting:
            min_available = self.kv.pool.num_pages  # the first sequence must be admitted now
        self.kv.release_ended(MAX_RELEASED_BLOCKS, min_available)

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
        # Draft tokens depend on the results of all steps in flight.
        drafts = None if self.in_flight else self._drafts_of_next_step
        view = view_of_running(self.columns, self.kv, self.sequences, drafts)
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
        num_query, middle = decision.num_query_tokens, view.num_decodes
        self._rows.plan_decodes(builder, view.slots[:middle], num_query[:middle], self.drafts)
        for i in range(middle, len(view.slots)):
            if num_query[i]:
                self._rows.plan_chunk(builder, int(view.slots[i]), int(num_query[i]))

    # -- steps in flight ------------------------------------------------------------------------------

    def launch(self, builder: StepPlanBuilder) -> StepInFlight:
        """Add a planned step to the steps in flight."""
        plan = builder.build()
        self.kv.launch(plan.step_id)
        slots = plan.slots.astype(np.int64)
        self.columns.last_step[slots] = plan.step_id
        sequence_ids = self.columns.sequence_id[slots]
        flight = StepInFlight(plan, slots, sequence_ids, builder.max_new_tokens())
        self.in_flight.append(flight)
        self._next_step += 1
        return flight

    def apply(self, result: StepResult, seconds: float, *, is_steady: bool) -> Outputs:
        """Apply the result of the oldest step in flight. Returns the new tokens of its sequences.

        `seconds` and `is_steady` are those of `FinishedStep`. Call `finish_applied` after the launch of the next step.
        """
        flight = self.in_flight.popleft()
        plan = flight.plan
        assert plan.step_id == result.step_id, "results come in the order of the launches"
        self.kv.retire(result.step_id)
        collected = collect(self.columns, flight, result)
        parts = (collected.tokens, *self._collect_preempted(flight, result, collected))
        kept = None
        if self.drafts is not None:
            # Before sequences end: the drafter ends them too, and that time is part of the next step.
            kept = self._finish_drafts(
                self.drafts, flight, result, parts, seconds=seconds, is_steady=is_steady
            )
        if len(plan.token_ids):
            self._count_prefills(flight)
        self._applied.append(AppliedStep(flight, result, collected, kept))
        for slot, reason in collected.ended():
            self.sequences.end(self.sequences.at(slot), reason)
        prompts = prompt_logprobs(flight, result.prompt_logprobs)
        return make_outputs(parts, result, prompts)

    def finish_applied(self) -> None:
        """Put full blocks into the prefix index, and count accepted draft tokens, for the steps that were applied."""
        while self._applied:
            step = self._applied.popleft()
            if self.drafts is not None and step.kept is not None:
                self._observe_drafts(self.drafts, step, step.kept)
            full = step.collected.with_full_block(self.columns, self.kv.granularity)
            for slot in full.tolist():
                self.sequences.cache_known_blocks(slot)

    def _before_release(self, slot: int) -> None:
        """Finish the applied steps while the sequence in a slot has it, and end its draft tokens."""
        self.finish_applied()
        if self.drafts is not None:
            self.record_passed_steps()
            self.drafts.end(slot)
            self._num_to_pass = self.drafts.num_unmeasured

    def record_passed_steps(self) -> None:
        """Tell the source of draft tokens how many plain steps it has not seen."""
        if self.drafts is not None and self._num_passed:
            self.drafts.pass_steps(self._num_passed)
            self._num_passed = 0

    def _count_prefills(self, flight: StepInFlight) -> None:
        """Count the prompts that a step completed."""
        num_decodes = flight.plan.num_decodes
        for row in flight.max_new_tokens[num_decodes:].nonzero()[0].tolist():
            state = self.sequences.get(flight.sequence_ids.item(num_decodes + row))
            if state is not None:
                self.counters.first_token(state.sequence)

    def _finish_drafts(
        self,
        drafts: DraftSource,
        flight: StepInFlight,
        result: StepResult,
        parts: tuple[NewTokens, ...],
        *,
        seconds: float,
        is_steady: bool,
    ) -> I32 | None:
        """Tell the source about a collected step, unless it need not know. `parts` are the tokens that sequences keep.

        Returns how many tokens each decode row keeps; None if the step had no draft tokens.
        """
        plan = flight.plan
        has_prompts = len(plan.token_ids) > 0
        is_seen = plan.num_draft_tokens or plan.next_drafts is not None
        if self._num_to_pass and not (is_seen or (has_prompts and drafts.has_model)):
            if not has_prompts:
                self._num_to_pass -= 1
                self._num_passed += 1
            return None
        self.record_passed_steps()
        kept = num_kept(flight, parts)[: plan.num_decodes] if plan.num_draft_tokens else None
        drafts.finish_step(FinishedStep.of(plan, kept, seconds, is_steady=is_steady))
        if result.next_draft_ids is not None and not self.in_flight:
            self._receive_drafts(drafts, flight, result.next_draft_ids)
        self._num_to_pass = drafts.num_unmeasured
        return kept

    def _observe_drafts(self, drafts: DraftSource, step: AppliedStep, kept: I32) -> None:
        """Count the draft tokens that sequences keep, and tell the source how many the model accepted.

        `kept` [num_decodes] are the new tokens that each sequence keeps. Some may have no slot.
        """
        flight = step.flight
        rows: slice | I64 = slice(len(kept))
        num_drafts = flight.plan.num_query_tokens[rows] - 1
        is_verified = num_drafts * kept
        if np.count_nonzero(is_verified) < len(kept):
            rows = is_verified.nonzero()[0]
            num_drafts, kept = num_drafts[rows], kept[rows]
        if not len(kept):
            return
        self.counters.verify(num_drafts, kept - 1)
        slots, num_accepted = flight.slots[rows], step.result.num_tokens[rows] - 1
        has_slot = self.columns.sequence_id[slots] == flight.sequence_ids[rows]
        if np.count_nonzero(has_slot) < len(slots):
            slots, num_drafts = slots[has_slot], num_drafts[has_slot]
            num_accepted = num_accepted[has_slot]
        drafts.observe(slots, num_drafts, num_accepted)

    def _receive_drafts(self, drafts: DraftSource, flight: StepInFlight, token_ids: I32) -> None:
        """Give the source the draft tokens that were made after the newest step."""
        rows = np.flatnonzero(flight.plan.wants_logits)
        slots = flight.slots[rows]
        has_slot = self.columns.sequence_id[slots] == flight.sequence_ids[rows]
        drafts.receive(slots[has_slot], token_ids.reshape(len(rows), -1)[has_slot])

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
                new = append_tokens(state.sequence, row, token_ids)
                late.append(new)
                if new.finish[0]:
                    self.sequences.end(state, FinishReason(int(new.finish[0])))
        return late
