"""Collectives of torch.distributed: gloo on CPUs, NCCL on NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, distributed

from tokenspeed_core.api import CommGroup, Problem


def all_reduce(problem: Problem, group: CommGroup) -> Callable[[Tensor], Tensor]:
    """Return `reduce(x [T, N]) -> x`, which adds up the x of all processes in place."""
    handle = group.handle

    def reduce(x: Tensor) -> Tensor:
        x = x.contiguous()
        distributed.all_reduce(x, group=handle)
        return x

    return reduce


def all_gather(problem: Problem, group: CommGroup) -> Callable[[Tensor], Tensor]:
    """Return `gather(x [T, N / P]) -> [T, N]`, which joins the rows of all processes."""
    handle, num_processes = group.handle, problem["num_processes"]

    def gather(x: Tensor) -> Tensor:
        parts = torch.empty(num_processes, *x.shape, dtype=x.dtype, device=x.device)
        distributed.all_gather(list(parts.unbind(0)), x.contiguous(), group=handle)
        return parts.transpose(0, 1).flatten(1)

    return gather
