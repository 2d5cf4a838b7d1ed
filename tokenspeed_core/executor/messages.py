"""The messages between rank 0 and the other ranks of an engine."""

from __future__ import annotations

from tokenspeed_core.api.step import LateInputs, StepPlan, StepSize
from tokenspeed_core.engine.wire import Codec, Message


class Rendezvous(Message, frozen=True, tag="rendezvous"):
    """All ranks meet at this address, which `worker.distributed.init` takes."""

    address: str


class Agreed(Message, frozen=True, tag="agreed"):
    """The smallest of the values that all ranks offered."""

    value: int


class ChooseStep(Message, frozen=True, tag="choose_step"):
    """Choose how to execute the next step, from the sizes of the steps of all engines that share experts."""

    sizes: tuple[StepSize, ...]


class Forward(Message, frozen=True, tag="forward"):
    """Launch the forward of a step."""

    plan: StepPlan


class Sample(Message, frozen=True, tag="sample"):
    """Launch the sampling of the step launched last."""

    step_id: int
    late: LateInputs | None


class Close(Message, frozen=True, tag="close"):
    """Free the device and exit."""


class Joined(Message, frozen=True, tag="joined"):
    """A rank is ready to meet the others. `files` are the digests of its model files (`digest_models`)."""

    rank: int
    files: dict[str, str]


class Offer(Message, frozen=True, tag="offer"):
    """A rank's value. The ranks agree on the smallest."""

    rank: int
    value: int


class RankFailed(Message, frozen=True, tag="rank_failed"):
    """A rank cannot continue; `message` says why and what to do."""

    rank: int
    message: str


to_worker = Codec(Rendezvous, Agreed, ChooseStep, Forward, Sample, Close)
to_rank_zero = Codec(Joined, Offer, RankFailed)
