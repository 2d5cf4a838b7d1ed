"""The step loop: plan, launch, collect. The host plans one step ahead of the device.

While step N runs, the host plans step N+1 from upper bounds of the lengths, launches it, and then collects step N.
The last token and the length of a row stay on the device between steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tokenspeed_core.api.hooks import StepRecord
from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.api.step import LateInputs, OutOfMemory, Runner, StepFailed, StepPlan
from tokenspeed_core.engine.messages import Outputs, Rejected, Submit
from tokenspeed_core.errors import EngineDeadError
from tokenspeed_core.scheduler.prefill_budget import PrefillBudget
from tokenspeed_core.scheduler.scheduler import Scheduler
from tokenspeed_core.scheduler.step_plan_builder import StepPlanBuilder

if TYPE_CHECKING:
    from tokenspeed_core.engine.grammars import Grammars
    from tokenspeed_core.engine.stats import EngineStats

log = logging.getLogger("tokenspeed.engine")

IDLE_SECONDS = 0.002  # that a step without work waits for a grammar
NO_GRAMMARS = (
    "structured output needs a grammar backend and a tokenizer: install the default plugins with "
    "`pip install 'tokenspeed-core[default]'`, and remove --grammar-backend none and --skip-tokenizer-init"
)
MAX_FAILURES = 3  # failed steps in a row, without those that ran out of memory, that end the engine


class LateSource(Protocol):
    """Provides sampling inputs that depend on the tokens of the previous step, such as a grammar's mask."""

    def wants(self, plan: StepPlan) -> bool:
        """Whether the sampling of a plan needs late inputs."""

    def late(self, plan: StepPlan) -> LateInputs | None:
        """Return the late inputs of a plan. Every earlier step has been collected."""


class Engine:
    """A scheduler and a runner with at most `depth` steps in flight."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        depth: int = 2,
        late_source: LateSource | None = None,
        grammars: Grammars | None = None,
        observe: Callable[[StepRecord], None] | None = None,
        bounds_decode_latency: bool = True,
        max_failures: int = MAX_FAILURES,
    ) -> None:
        """Start without requests. With `depth` 1, each step is collected before the next is planned.

        `grammars` serves requests with a grammar, and is the late source then.
        `observe` is called with every collected step while the next one runs. `bounds_decode_latency` keeps steps
        short while sequences decode. `step` raises EngineDeadError after `max_failures` failed steps in a row, not
        counting those that ran out of memory; with 0, after the first failed step of any kind.
        """
        self.scheduler = scheduler
        self.runner = runner
        self.num_steps = 0
        self._depth = depth
        self._grammars = grammars
        self._late_source = grammars if late_source is None else late_source
        self._observe = observe
        self._prefill_budget = PrefillBudget(
            scheduler.limits.token_budget, bounds_decode_latency=bounds_decode_latency
        )
        self._is_overlapped = False  # another step was in flight when the last one was collected
        self._num_failures = 0
        self._max_failures = max_failures

    @property
    def has_work(self) -> bool:
        """Whether a sequence is live or waits for its grammar, or a step is in flight."""
        return self.scheduler.has_work or bool(self._grammars and self._grammars.num_held)

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot, including those whose grammar is being compiled."""
        num_held = 0 if self._grammars is None else self._grammars.num_held
        return self.scheduler.sequences.num_waiting + num_held

    def stats(self) -> EngineStats:
        """Return the counters since the start, and the state of the KV cache."""
        scheduler = self.scheduler
        scheduler.record_passed_steps()
        return scheduler.counters.snapshot(
            scheduler.kv, scheduler.num_preemptions, scheduler.drafts
        )

    def submit(self, request: Submit) -> Rejected | None:
        """Queue a request, or return why it is rejected.

        A request with a grammar may be rejected later (`take_rejected`).
        """
        if request.grammar is None:
            return self.scheduler.submit(request)
        if self._grammars is None:
            return Rejected(request.request_id, "bad_grammar", NO_GRAMMARS)
        return self._grammars.submit(request)

    def take_rejected(self) -> list[Rejected]:
        """Return the sequences that were rejected after `submit`, once each."""
        if self._grammars is None or not self._grammars.rejected:
            return []
        rejected, self._grammars.rejected = self._grammars.rejected, []
        return rejected

    def abort(self, sequence_ids: Iterable[int]) -> None:
        """End sequences at once."""
        sequence_ids = list(sequence_ids)
        self.scheduler.abort(sequence_ids)
        if self._grammars is not None:
            self._grammars.abort(sequence_ids)

    def step(self) -> list[Outputs]:
        """Plan and launch the next step; collect the oldest one if `depth` steps are in flight.

        If draft tokens are worth it, all steps in flight are collected first. Raises EngineDeadError, and
        PluginError if a policy plugin fails.
        """
        outputs: list[Outputs] = []
        in_flight = self.scheduler.in_flight
        if self._grammars is not None and self._grammars.is_compiling:
            self._grammars.poll(0.0 if self.scheduler.has_work else IDLE_SECONDS)
        counters, started_at = self.scheduler.counters, perf_counter()
        # Lengths after a step with draft tokens are upper bounds, and an eager step needs exact ones.
        if in_flight and (in_flight[-1].plan.num_draft_tokens or self.scheduler.wants_results()):
            counters.host_seconds += perf_counter() - started_at
            while in_flight:
                outputs.append(self.collect())
            started_at = perf_counter()
        has_decodes = self.scheduler.columns.has_decodes
        builder = self.scheduler.plan(
            self._prefill_budget.max_prefill_tokens(has_decodes=has_decodes)
        )
        counters.host_seconds += perf_counter() - started_at
        if builder is not None:
            outputs += self.launch(builder)
        if in_flight and (builder is None or len(in_flight) >= self._depth):
            outputs.append(self.collect())
        self.scheduler.finish_applied()
        return outputs

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache."""
        self.scheduler.kv.reset_prefix_cache()

    def close(self) -> None:
        """Close the runner."""
        self.runner.close()
        if self._grammars is not None:
            self._grammars.close()

    def launch(self, builder: StepPlanBuilder) -> list[Outputs]:
        """Launch a step. Returns the outputs of earlier steps that had to be collected first."""
        outputs: list[Outputs] = []
        in_flight = self.scheduler.in_flight
        is_first = not in_flight
        flight = self.scheduler.launch(builder)
        plan = flight.plan
        # The work between two steps of a sequence counts for the second one.
        if is_first and not plan.num_decodes:
            self._prefill_budget.start_after_idle()
        try:
            self.runner.forward(plan)
            late = None
            if self._late_source is not None and self._late_source.wants(plan):
                outputs += self._collect_before(plan)
                if in_flight:
                    late = self._late_source.late(plan)
            self.runner.sample(plan.step_id, late)
        except StepFailed as error:
            outputs += self._collect_before(plan)
            outputs.append(self._fail(error))
            return outputs
        flight.is_launched = True
        if not in_flight:  # an earlier step failed, and this one's sequences ended with it
            self._discard(plan.step_id)
        return outputs

    def _collect_before(self, plan: StepPlan) -> list[Outputs]:
        """Collect all steps in flight that were launched before a plan."""
        outputs = []
        in_flight = self.scheduler.in_flight
        while in_flight and in_flight[0].plan is not plan:
            outputs.append(self.collect())
        return outputs

    def collect(self) -> Outputs:
        """Wait for the oldest step in flight. Returns the new tokens of its sequences."""
        in_flight = self.scheduler.in_flight
        plan = in_flight[0].plan
        try:
            result = self.runner.collect(plan.step_id)
        except StepFailed as error:
            for later in list(in_flight)[1:]:
                if later.is_launched:
                    self._discard(later.plan.step_id)
            return self._fail(error)
        self._num_failures = 0
        self.num_steps += 1
        num_tokens, num_prompt_tokens = plan.num_tokens, len(plan.token_ids)
        seconds = self._prefill_budget.finish_step(num_tokens, num_prompt_tokens)
        # The step's time includes the planning of the next one, which takes long if it admits sequences.
        is_overlapped = len(in_flight) > 1 and not len(in_flight[1].plan.token_ids)
        was_overlapped, self._is_overlapped = self._is_overlapped, len(in_flight) > 1
        if self._observe is not None:
            self._observe(
                StepRecord(plan.step_id, plan.num_rows, plan.num_decodes, num_tokens, seconds)
            )
        is_steady = self._depth == 1 or (was_overlapped and is_overlapped)
        started_at = perf_counter()
        outputs = self.scheduler.apply(result, seconds, is_steady=is_steady)
        counters = self.scheduler.counters
        counters.host_seconds += perf_counter() - started_at
        counters.finish_step(plan, len(outputs.token_ids), seconds)
        if np.count_nonzero(outputs.finish):
            _log_errors(plan.step_id, outputs)
        return outputs

    def _discard(self, step_id: int) -> None:
        """Drop the result of a step that follows a failed one."""
        try:
            self.runner.collect(step_id)
        except StepFailed:
            return  # its sequences have ended already

    def _fail(self, error: StepFailed) -> Outputs:
        """End the sequences of all steps in flight with an error. Other sequences go on."""
        log.error("%s", error, exc_info=error.__cause__)
        if not isinstance(error, OutOfMemory):
            self._num_failures += 1
        failed = self.scheduler.fail()
        if self._num_failures >= self._max_failures:
            message = str(error)
            if self._num_failures > 1:
                message = f"{self._num_failures} steps in a row failed; the last: {message}"
            raise EngineDeadError(message) from error
        return _errors(failed)


def _log_errors(step_id: int, outputs: Outputs) -> None:
    failed = outputs.sequence_ids[outputs.finish == FinishReason.ERROR]
    if len(failed):
        log.error(
            "Step %d returned no finite logit for sequences %s; they end with an error.",
            step_id,
            failed.tolist(),
        )


def _errors(sequence_ids: list[int]) -> Outputs:
    """Return the outputs that end sequences with an error."""
    zeros = np.zeros(len(sequence_ids), np.int32)
    return Outputs(
        np.asarray(sequence_ids, np.int64),
        zeros,
        zeros[:0],
        zeros + np.int32(FinishReason.ERROR),
        zeros,
    )
