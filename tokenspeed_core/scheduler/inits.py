"""What the device is told of a sequence when it takes a slot."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import numpy as np

from tokenspeed_core.api.step import F32, I32, SlotInits
from tokenspeed_core.engine.messages import Submit
from tokenspeed_core.scheduler.sequence import Sequence


def has_penalties(request: Submit) -> bool:
    """Say whether sampling needs to know which tokens the sequence has already."""
    return bool(
        request.presence_penalty or request.frequency_penalty or request.repetition_penalty != 1.0
    )


def slot_inits(newcomers: list[tuple[int, Sequence]]) -> SlotInits:
    """Return the columns for sequences that take slots with a step."""
    requests = [sequence.request for _, sequence in newcomers]
    histories = [
        sequence.tokens if has_penalties(sequence.request) else _EMPTY for _, sequence in newcomers
    ]

    def floats(values: Iterable[float]) -> F32:
        return np.fromiter(values, np.float32, len(requests))

    def ints(values: Iterable[int]) -> I32:
        return np.fromiter(values, np.int32, len(requests))

    return SlotInits(
        slots=ints(slot for slot, _ in newcomers),
        temperature=floats(r.temperature for r in requests),
        top_k=ints(r.top_k for r in requests),
        top_p=floats(r.top_p for r in requests),
        min_p=floats(r.min_p for r in requests),
        presence_penalty=floats(r.presence_penalty for r in requests),
        frequency_penalty=floats(r.frequency_penalty for r in requests),
        repetition_penalty=floats(r.repetition_penalty for r in requests),
        seed=np.fromiter(
            (_wrap(sequence.seed) for _, sequence in newcomers), np.int64, len(requests)
        ),
        logprobs=ints(r.logprobs for r in requests),
        bias_starts=_starts(len(r.bias_ids) for r in requests),
        bias_ids=np.concatenate([r.bias_ids for r in requests]),
        bias_values=np.concatenate([r.bias_values for r in requests]),
        history_starts=_starts(len(history) for history in histories),
        history_ids=np.concatenate(histories),
        history_num_prompt=ints(
            sequence.num_prompt if len(history) else 0
            for (_, sequence), history in zip(newcomers, histories, strict=True)
        ),
    )


_EMPTY = np.zeros(0, np.int32)


def _starts(lengths: Iterable[int]) -> I32:
    return np.fromiter(accumulate(lengths, initial=0), np.int32)


def _wrap(seed: int) -> int:
    """Return the 64-bit two's complement of a seed that `n` may have carried past its range."""
    return (seed + 2**63) % 2**64 - 2**63
