"""Choice of the replica for a request: a pure function of the replicas' loads and cached prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# The computed prompt tokens that delay a replica's requests as much as one more running sequence.
# In `benchmarks/replicas.py`, 64 and 256 are equally good, and 1024 is worse.
SEQUENCE_COST = 256


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """The work of a replica."""

    num_sequences: int = 0  # unfinished
    num_prefill: int = 0  # prompt tokens that it has to compute before it is idle
    num_computed: int = 0  # prompt tokens that it was sent and had not cached, since the start


def choose(
    loads: Sequence[ReplicaLoad | None], num_cached: Sequence[int], num_tokens: int
) -> int | None:
    """Return the replica that needs the least work to compute a prompt of `num_tokens`.

    `num_cached[i]` are the tokens of the prompt in the cache of replica i. A replica without a load
    cannot take requests; the result is None if none can. Among equals, the one that has computed the
    least gets the request, so that caches fill evenly.
    """
    costs = [
        (
            load.num_prefill + num_tokens - cached + SEQUENCE_COST * load.num_sequences,
            load.num_computed,
            replica,
        )
        for replica, (load, cached) in enumerate(zip(loads, num_cached, strict=True))
        if load is not None
    ]
    return min(costs)[2] if costs else None
