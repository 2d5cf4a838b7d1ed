"""The op `exchange_tokens` with DeepEP: sends tokens to the processes of their experts, and adds up the results.

The library counts the tokens on the device. The result has room for the tokens of all processes, so that the host does
not wait; rows beyond the received tokens have no expert of this process.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from tokenspeed_comm_deepep.options import DeepEPOptions
from tokenspeed_core.api import CommGroup, Problem

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]


def exchange_tokens(problem: Problem, group: CommGroup, *, options: DeepEPOptions) -> Exchange:
    """Return `exchange(x [T, N], weights [T, k], ids [T, k], owners [E], compute) -> [T, N]`.

    All processes of the group call it. Raises ValueError for engines of several processes, and for a number of processes
    that the library has no settings for, and ImportError if the library does not load.
    """
    num_processes: int = problem["num_processes"]
    try:
        kinds = import_module("deep_ep").Buffer
    except ImportError as error:
        raise ImportError(
            f"DeepEP does not load: {error}. If a symbol of NCCL is missing, DeepEP needs a newer NCCL than this torch has. "
            "Use another --all2all-backend."
        ) from error
    try:
        configs = kinds.get_dispatch_config(num_processes), kinds.get_combine_config(num_processes)
    except AssertionError as error:
        raise ValueError(
            f"DeepEP has no settings for {num_processes} processes. Use 2, 4 or 8."
        ) from error
    if len(group.tokens.of(0)) != num_processes:
        raise ValueError(
            "DeepEP supports engines of one process. Remove --tensor-parallel-size, or use another --all2all-backend."
        )
    row = problem["size"] * getattr(torch, problem["dtype"]).itemsize
    num_bytes = max(each.get_nvl_buffer_size_hint(row, num_processes) for each in configs)
    return Exchange(kinds(group.handle, num_bytes), group)


class Exchange:
    """The kernel of a process. All processes have the same number of experts."""

    def __init__(self, buffer: Any, group: CommGroup) -> None:
        self._buffer, self._tokens = buffer, group.tokens
        self._rank, self._num_processes = group.group.rank, group.group.size

    def __call__(
        self, x: Tensor, weights: Tensor, ids: Tensor, owners: Tensor, compute: Compute
    ) -> Tensor:
        """Return for each token of x [T, N] the sum of the results of the processes that own its experts `ids` [T, k]."""
        buffer, num_local = self._buffer, owners.shape[0] // self._num_processes
        # The library numbers experts in the order of their processes.
        by_owner = owners.argsort(stable=True)
        wide = by_owner.argsort()[ids.long()]
        per_process, _, per_expert, is_sent, _ = buffer.get_dispatch_layout(wide, owners.shape[0])
        received, local_ids, their_weights, _, handle, _ = buffer.dispatch(
            x.contiguous(),
            num_tokens_per_rank=per_process,
            is_token_in_rank=is_sent,
            num_tokens_per_expert=per_expert,
            topk_idx=wide,
            topk_weights=weights,
            num_worst_tokens=sum(self._tokens.of(len(x))),
        )
        # `local_ids` counts experts from this process's first one. Experts of other processes are -1.
        first = self._rank * num_local
        elsewhere = (self._rank + 1) % self._num_processes * num_local
        their_ids = by_owner[torch.where(local_ids < 0, elsewhere, local_ids + first)].int()
        parts = compute(received, their_weights, their_ids)
        result: Tensor = buffer.combine(parts, handle)[0]
        return result
