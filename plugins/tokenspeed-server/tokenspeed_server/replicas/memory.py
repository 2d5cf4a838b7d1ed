"""Shared memory of the API workers: the prefixes that were sent to each replica, and the loads of the replicas.

A value has 8 bytes and is written in one store, so that a reader never sees half of it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from tokenspeed_core.api.step import I32
from tokenspeed_core.commands.serving import HashChain
from tokenspeed_server.replicas.router import ReplicaLoad

GRANULARITY = 64  # tokens per digest
NUM_CELLS = 2**16  # per replica, for 4 million tokens
_LOAD_FIELDS = 3


class ReplicaMemory:
    """Memory with a table of prefixes per replica, and a load per worker and replica.

    The cell of a prefix is chosen by its digest, and a later prefix replaces an earlier one in the same
    cell. So the tables are bounded, and drop old prefixes, as the caches do. A table only estimates the
    content of a cache: an error costs time, and nothing else.
    """

    def __init__(self, num_workers: int, num_replicas: int, fd: int | None = None) -> None:
        """Make the memory, or open that of the parent process by its descriptor."""
        num_loads = num_workers * num_replicas * _LOAD_FIELDS
        num_bytes = 8 * (num_replicas * NUM_CELLS + num_loads)
        self.fd = os.memfd_create("tokenspeed-replicas") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, num_bytes)
        memory = mmap.mmap(self.fd, num_bytes)
        self._loads = np.frombuffer(memory, np.int64, num_loads).reshape(
            num_workers, num_replicas, _LOAD_FIELDS
        )
        cells = np.frombuffer(memory, np.uint64, offset=8 * num_loads)
        self._cells = cells.reshape(num_replicas, NUM_CELLS)
        self.num_replicas = num_replicas
        self.num_workers = num_workers

    def fit(self, num_kv_tokens: int) -> None:
        """Use about as many cells as a cache of this size has prefixes, so that both drop prefixes after a similar time."""
        wanted = 1 << max(0, num_kv_tokens // GRANULARITY - 1).bit_length()
        self._cells = self._cells[:, : min(NUM_CELLS, wanted)]

    def find(self, digests: np.ndarray[Any, np.dtype[np.uint64]]) -> list[int]:
        """Return for each replica the tokens of the longest prefix that was sent to it."""
        if not len(digests):
            return [0] * self.num_replicas
        found = self._cells[:, self._places(digests)] == digests
        # The longest prefix includes the shorter ones, even if other prefixes have overwritten their cells.
        longest = np.where(found, np.arange(1, len(digests) + 1), 0).max(axis=1)
        return (longest * GRANULARITY).tolist()  # type: ignore[no-any-return]

    def add(self, replica: int, digests: np.ndarray[Any, np.dtype[np.uint64]]) -> None:
        """Remember that a replica got a prompt with these prefixes."""
        self._cells[replica, self._places(digests)] = digests

    def forget(self, replica: int) -> None:
        """Remove the prefixes of a replica, which starts again with an empty cache."""
        self._cells[replica] = 0

    def set_load(self, worker: int, replica: int, load: ReplicaLoad) -> None:
        """Replace the part of a load that this worker sent."""
        self._loads[worker, replica] = (load.num_sequences, load.num_prefill, load.num_computed)

    def loads(self) -> list[ReplicaLoad]:
        """Return the load of each replica by all workers."""
        return [ReplicaLoad(*row) for row in self._loads.sum(axis=0).tolist()]

    def _places(self, digests: np.ndarray[Any, np.dtype[np.uint64]]) -> Any:
        return digests & np.uint64(self._cells.shape[1] - 1)


def prefix_digests(
    prompt: I32, tenant: str, cache_salt: str
) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return digests of the prefixes of a prompt, the shortest first. Tenants and salts share none."""
    chain = HashChain(GRANULARITY, f"{tenant}\0{cache_salt}", 0)
    chain.extend(prompt[:-1])  # the last token is always computed
    ends: Sequence[int] = range(GRANULARITY, chain.num_tokens + 1, GRANULARITY)
    return np.frombuffer(b"".join(chain.at(end) for end in ends), np.uint64)[::2]
