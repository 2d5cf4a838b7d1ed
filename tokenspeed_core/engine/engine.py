"""The step loop: plan, launch, collect, with the host a step ahead of the device.

While step N runs, step N+1 is planned from upper bounds and launched; then N's tokens are collected. What a
row needs of the step before (its last token, its length) never leaves the device in between.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

from tokenspeed_core.api.hooks import StepRecord
from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.api.step import I32, LateInputs, OutOfMemory, Runner, StepFailed, StepPlan
from tokenspeed_core.engine.messages import Outputs, Rejected, Submit
from tokenspeed_core.errors import EngineDeadError
from tokenspeed_core.scheduler.prefill_budget import PrefillBudget
from tokenspeed_core.scheduler.scheduler import Scheduler
from tokenspeed_core.scheduler.step_plan_builder import StepPlanBuilder

log = logging.getLogger("tokenspeed.engine")

MAX_FAILURES = (
    3  # failed steps in a row, but for those without memory, after which the device is given up
)


class LateSource(Protocol):
    """Host inputs of the sampling launch that depend on the tokens of the step before (a grammar's mask)."""

    def wants(self, plan: StepPlan) -> bool:
        """Say whether a plan's sampling needs them. Changes nothing."""

    def late(self, plan: StepPlan) -> LateInputs | None:
        """Return them, when every step before the plan's has been collected."""


class Engine:
    """A scheduler and a runner, at most `depth` steps in flight between them."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        depth: int = 2,
        late_source: LateSource | None = None,
        observe: Callable[[StepRecord], None] | None = None,
        limits_prefill_while_decoding: bool = True,
        max_failures: int = MAX_FAILURES,
    ) -> None:
        """Start idle. With `depth` 1 each step is collected before the next is planned.

        `observe` is told of every collected step, while the next one runs. `limits_prefill_while_decoding` keeps steps short
        while sequences decode, for those who watch their tokens come. After `max_failures` failed steps in a row,
        those apart that found too little memory, `step` raises EngineDeadError; with 0 after the first of any kind.
        """
        self.scheduler, self.runner = scheduler, runner
        self.num_steps = 0
        self._depth, self._late_source, self._observe = depth, late_source, observe
        self._pace = PrefillBudget(
            scheduler.limits.token_budget,
            limits_prefill_while_decoding=limits_prefill_while_decoding,
        )
        self._launched: list[StepPlan] = []
        self._num_failures, self._max_failures = 0, max_failures

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do, now or after what is in flight."""
        return self.scheduler.has_work

    def submit(self, request: Submit) -> Rejected | None:
        """Take a request, or say why not."""
        return self.scheduler.submit(request)

    def abort(self, sequence_ids: Iterable[int]) -> None:
        """Stop planning sequences at once."""
        self.scheduler.abort(sequence_ids)

    def step(self) -> list[Outputs]:
        """Plan and launch the next step, then collect the oldest if `depth` are in flight.

        Raises EngineDeadError, and PluginError where the policy is a plugin's and fails.
        """
        outputs: list[Outputs] = []
        draft = self.scheduler.plan(
            self._pace.max_prefill(beside_decodes=self.scheduler.columns.has_decodes)
        )
        if draft is not None:
            outputs += self.launch(draft)
        if self._launched and (draft is None or len(self._launched) >= self._depth):
            outputs.append(self.collect())
        return outputs

    def launch(self, draft: StepPlanBuilder, group_num_tokens: I32 | None = None) -> list[Outputs]:
        """Launch a draft. Returns what had to be collected before its sampling could be launched."""
        if not self._launched:
            self._pace.launched()
        plan = self.scheduler.launched(draft, group_num_tokens)
        outputs: list[Outputs] = []
        try:
            self.runner.forward(plan)
            late = None
            if self._late_source is not None and self._late_source.wants(plan):
                while self._launched:
                    outputs.append(self.collect())
                if self.scheduler.num_in_flight:
                    late = self._late_source.late(plan)
            self.runner.sample(plan.step_id, late)
        except StepFailed as error:
            while self._launched:
                outputs.append(self.collect())
            outputs.append(self._failed(plan.step_id, error))
            return outputs
        if not self.scheduler.num_in_flight:
            self._discard(
                plan.step_id
            )  # a step before it failed meanwhile, and ended its sequences
            return outputs
        self._launched.append(plan)
        return outputs

    def collect(self) -> Outputs:
        """Wait for the oldest step in flight and return what its sequences got."""
        plan = self._launched.pop(0)
        try:
            result = self.runner.collect(plan.step_id)
        except StepFailed as error:
            for later in self._launched:
                self._discard(later.step_id)
            self._launched.clear()
            return self._failed(plan.step_id, error)
        self._num_failures = 0
        self.num_steps += 1
        seconds = self._pace.finished(plan.num_tokens, len(plan.token_ids))
        if self._observe is not None:
            self._observe(
                StepRecord(plan.step_id, plan.num_rows, plan.num_decodes, plan.num_tokens, seconds)
            )
        outputs = self.scheduler.apply(result)
        if outputs.finish.any() and len(
            ended := outputs.sequence_ids[outputs.finish == FinishReason.ERROR]
        ):
            log.error(
                "step %d gave no finite logit for the sequences %s, which end here",
                plan.step_id,
                ended.tolist(),
            )
        return outputs

    def reset_prefix_cache(self) -> None:
        """Forget the content of every cached block."""
        self.scheduler.kv.reset()

    def close(self) -> None:
        """Free the device."""
        self.runner.close()

    def _discard(self, step_id: int) -> None:
        try:
            self.runner.collect(step_id)
        except StepFailed:
            return  # its sequences end with the failure that came before it

    def _failed(self, step_id: int, error: StepFailed) -> Outputs:
        """End the sequences of a failed step with an error; others go on."""
        log.error("%s", error, exc_info=error.__cause__)
        self._num_failures += not isinstance(error, OutOfMemory)
        failed = self.scheduler.fail(step_id)
        if self._num_failures >= self._max_failures:
            first = (
                f"{self._num_failures} steps in a row failed; the last: "
                if self._num_failures > 1
                else ""
            )
            raise EngineDeadError(f"{first}{error}") from error
        return _errors(failed)


def _errors(sequence_ids: list[int]) -> Outputs:
    zeros = np.zeros(len(sequence_ids), np.int32)
    return Outputs(
        np.asarray(sequence_ids, np.int64),
        zeros,
        zeros[:0],
        zeros + np.int32(FinishReason.ERROR),
        zeros,
    )
