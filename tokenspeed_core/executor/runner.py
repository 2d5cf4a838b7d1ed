"""The runner of rank 0: all other ranks execute the same steps, in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import zmq

from tokenspeed_core.api.step import LateInputs, StepFailed, StepPlan, StepResult, StepSize
from tokenspeed_core.executor.lockstep import SharingRunner
from tokenspeed_core.executor.messages import ChooseStep, Close, Forward, Sample
from tokenspeed_core.executor.ranks import Ranks


class DistributedRunner:
    """A `Runner` that publishes each plan and then executes it in this process.

    Every failure is final: the ranks are no longer in step then. The message names the rank that failed first.
    """

    def __init__(self, runner: SharingRunner, ranks: Ranks) -> None:
        """Take the runner of rank 0, and the other ranks, which have built equal runners."""
        self._runner = runner
        self._ranks = ranks

    def step_size(self, plan: StepPlan) -> StepSize:
        """Return the size of this engine's next step."""
        return self._runner.step_size(plan)

    def choose_shared_step(self, sizes: Sequence[StepSize]) -> bool:
        """Choose how all engines execute the next step, on all ranks (see `SharingRunner`)."""
        self._ranks.broadcast(ChooseStep(tuple(sizes)))
        return self._runner.choose_shared_step(sizes)

    def forward(self, plan: StepPlan) -> None:
        """Launch the forward of a step on all ranks. Raises StepFailed."""
        self._check()
        self._ranks.broadcast(Forward(plan))
        try:
            self._runner.forward(plan)
        except StepFailed as error:
            self._raise_lost_rank()
            raise error

    def sample(self, step_id: int, late: LateInputs | None) -> None:
        """Launch the sampling of the step launched last on all ranks. Raises StepFailed."""
        self._ranks.broadcast(Sample(step_id, late))
        try:
            self._runner.sample(step_id, late)
        except StepFailed as error:
            self._raise_lost_rank()
            raise error

    def collect(self, step_id: int) -> StepResult:
        """Wait for the oldest launched step on this rank. Raises StepFailed."""
        try:
            result = self._runner.collect(step_id)
        except StepFailed as error:
            self._raise_lost_rank()
            raise error
        self._check()  # kernels that stopped waiting for a lost rank return wrong values
        return result

    def close(self) -> None:
        """End all ranks and free the device memory. Can be called twice."""
        with suppress(zmq.ZMQError):  # closed already
            self._ranks.broadcast(Close())
        self._runner.close()
        self._ranks.close()

    def _check(self) -> None:
        if self._ranks.failure is not None:
            raise StepFailed(self._ranks.failure)

    def _raise_lost_rank(self) -> None:
        """Raise StepFailed if a rank failed, without the traceback of the collective that waited for it."""
        reason = self._ranks.wait_for_lost_rank()
        if reason is not None:
            raise StepFailed(reason) from None
