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


def all_gather_tokens(problem: Problem, group: CommGroup) -> Callable[[Tensor], Tensor]:
    """Return `gather(x [T, N]) -> [T of all processes, N]`. Rows are padded to the largest number of tokens."""
    handle, tokens = group.handle, group.tokens

    def gather(x: Tensor) -> Tensor:
        counts = tokens.of(len(x))
        largest = max(counts)
        parts = torch.empty(len(counts), largest, *x.shape[1:], dtype=x.dtype, device=x.device)
        padded = x.contiguous()
        if len(x) < largest:
            padded = x.new_zeros(largest, *x.shape[1:])
            padded[: len(x)] = x
        distributed.all_gather(list(parts.unbind(0)), padded, group=handle)
        if min(counts) == largest:
            return parts.flatten(0, 1)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    return gather


def reduce_scatter_tokens(problem: Problem, group: CommGroup) -> Callable[[Tensor], Tensor]:
    """Return `scatter(x [T of all processes, N]) -> [T, N]`, which adds up the x of all processes."""
    handle, tokens, rank = group.handle, group.tokens, group.group.rank
    num_processes = group.group.size

    def scatter(x: Tensor) -> Tensor:
        counts = tokens.of(len(x) // num_processes)
        parts = list(torch.split(x.contiguous(), list(counts)))
        own = torch.empty_like(parts[rank])
        distributed.reduce_scatter(own, parts, group=handle)
        return own

    return scatter
