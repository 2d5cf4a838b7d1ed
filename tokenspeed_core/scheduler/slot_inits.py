"""Builds the sampling state that is sent to the device when a sequence is assigned to a slot."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import numpy as np

from tokenspeed_core.api.step import F32, I32, SlotInits
from tokenspeed_core.engine.messages import Submit
from tokenspeed_core.scheduler.sequence import Sequence

_NO_TOKENS = np.zeros(0, np.int32)


def slot_inits(slots: Iterable[int], sequences: list[Sequence]) -> SlotInits:
    """Return the sampling state of sequences that take `slots`."""
    requests = [sequence.request for sequence in sequences]
    histories = [
        sequence.tokens if _needs_history(sequence.request) else _NO_TOKENS
        for sequence in sequences
    ]

    num_endless = [
        max(0, sequence.num_prompt + sequence.request.min_tokens - len(sequence.tokens))
        if sequence.grammar is None  # a grammar applies `min_tokens` itself
        else 0
        for sequence in sequences
    ]
    end_ids = [
        r.stop_token_ids if num else _NO_TOKENS
        for r, num in zip(requests, num_endless, strict=True)
    ]

    def floats(values: Iterable[float]) -> F32:
        return np.fromiter(values, np.float32, len(requests))

    def ints(values: Iterable[int]) -> I32:
        return np.fromiter(values, np.int32, len(requests))

    return SlotInits(
        slots=ints(slots),
        temperature=floats(r.temperature for r in requests),
        top_k=ints(r.top_k for r in requests),
        top_p=floats(r.top_p for r in requests),
        min_p=floats(r.min_p for r in requests),
        presence_penalty=floats(r.presence_penalty for r in requests),
        frequency_penalty=floats(r.frequency_penalty for r in requests),
        repetition_penalty=floats(r.repetition_penalty for r in requests),
        seed=np.fromiter((_to_int64(s.seed) for s in sequences), np.int64, len(requests)),
        logprobs=ints(r.logprobs for r in requests),
        bias_starts=_starts(len(r.bias_ids) for r in requests),
        bias_ids=np.concatenate([r.bias_ids for r in requests]),
        bias_values=np.concatenate([r.bias_values for r in requests]),
        history_starts=_starts(len(history) for history in histories),
        history_ids=np.concatenate(histories),
        history_num_prompt=ints(
            sequence.num_prompt if len(history) else 0
            for sequence, history in zip(sequences, histories, strict=True)
        ),
        num_endless=ints(num_endless),
        end_starts=_starts(map(len, end_ids)),
        end_ids=np.concatenate(end_ids),
        processors=tuple(r.processors for r in requests)
        if any(r.processors for r in requests)
        else (),
    )


def _needs_history(request: Submit) -> bool:
    return bool(
        request.presence_penalty
        or request.frequency_penalty
        or request.repetition_penalty != 1.0
        or request.processors
    )


def _starts(lengths: Iterable[int]) -> I32:
    return np.fromiter(accumulate(lengths, initial=0), np.int32)


def _to_int64(seed: int) -> int:
    """Return a seed as a signed 64-bit integer. A seed plus the index of a sequence may exceed it and wraps around."""
    return (seed + 2**63) % 2**64 - 2**63
