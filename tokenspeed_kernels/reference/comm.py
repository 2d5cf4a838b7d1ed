"""Collectives of torch.distributed: gloo on CPUs, NCCL on NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

from tokenspeed_core.api import CommGroup, Problem
from tokenspeed_kernels.reference.fp8 import AddNorm, Quantize, quantize_fp8
from tokenspeed_kernels.reference.fp8_block import quantize_fp8_groups
from tokenspeed_kernels.reference.norm import add_rms_norm

# Collectives with parts of equal size. torch 2.13 renamed them.
_equal: Any = distributed
_gather_equal = getattr(_equal, "all_gather_single", None) or _equal.all_gather_into_tensor
_scatter_equal = getattr(_equal, "reduce_scatter_single", None) or _equal.reduce_scatter_tensor


def all_reduce(problem: Problem, group: CommGroup) -> Callable[[Tensor], Tensor]:
    """Return `reduce(x [T, N]) -> x`, which adds up the x of all processes in place."""
    handle = group.handle

    def reduce(x: Tensor) -> Tensor:
        x = x.contiguous()
        distributed.all_reduce(x, group=handle)
        return x

    return reduce


def all_reduce_add_rms_norm(
    problem: Problem, group: CommGroup
) -> Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]:
    """Return `reduce(x [T, N], residual, weight, eps) -> (y, residual)`, which adds all x into `residual`.

    Sums are in the order of the ranks, so that all processes get the same bits.
    """
    handle, num_processes, add_norm = group.handle, problem["num_processes"], add_rms_norm(problem)

    def reduce(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        parts = torch.empty(num_processes, *x.shape, dtype=x.dtype, device=x.device)
        distributed.all_gather(list(parts.unbind(0)), x.contiguous(), group=handle)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return add_norm(total.to(x.dtype), residual, weight, eps)

    return reduce


def all_reduce_add_rms_norm_fp8(problem: Problem, group: CommGroup) -> AddNorm:
    """Return `reduce(x [T, N], residual, weight, eps) -> (y float8_e4m3fn, scale [T, 1], residual)`."""
    return _quantizing(all_reduce_add_rms_norm(problem, group), quantize_fp8(problem))


def all_reduce_add_rms_norm_fp8_groups(problem: Problem, group: CommGroup) -> AddNorm:
    """Return `reduce(x [T, N], residual, weight, eps) -> (y float8_e4m3fn, scale [T, ceil(N / 128)], residual)`."""
    return _quantizing(all_reduce_add_rms_norm(problem, group), quantize_fp8_groups(problem))


def _quantizing(
    norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]], quantize: Quantize
) -> AddNorm:
    def reduce(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, residual = norm(x, residual, weight, eps)
        return *quantize(y), residual

    return reduce


def all_gather(problem: Problem, group: CommGroup) -> Callable[[Tensor], Tensor]:
    """Return `gather(x [T, N / P]) -> [T, N]`, which joins the parts of each row, in rank order."""
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
        if min(counts) == largest:
            joined = x.new_empty(largest * len(counts), *x.shape[1:])
            _gather_equal(joined, x.contiguous(), group=handle)
            return joined
        parts = torch.empty(len(counts), largest, *x.shape[1:], dtype=x.dtype, device=x.device)
        padded = x.contiguous()
        if len(x) < largest:
            padded = x.new_zeros(largest, *x.shape[1:])
            padded[: len(x)] = x
        distributed.all_gather(list(parts.unbind(0)), padded, group=handle)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    return gather


def reduce_scatter_tokens(problem: Problem, group: CommGroup) -> Callable[[Tensor], Tensor]:
    """Return `scatter(x [T of all processes, N]) -> [T, N]`, which adds up the x of all processes."""
    handle, tokens, rank = group.handle, group.tokens, group.group.rank
    num_processes = group.group.size

    def scatter(x: Tensor) -> Tensor:
        counts = tokens.of(len(x) // num_processes)
        if min(counts) == max(counts):
            own = x.new_empty(counts[rank], *x.shape[1:])
            _scatter_equal(own, x.contiguous(), group=handle)
            return own
        parts = list(torch.split(x.contiguous(), list(counts)))
        own = torch.empty_like(parts[rank])
        distributed.reduce_scatter(own, parts, group=handle)
        return own

    return scatter


def exchange_tokens(problem: Problem, group: CommGroup) -> Callable[..., Tensor]:
    """Return `exchange(x [T, N], weights [T, k], ids [T, k], owners [E], compute) -> [T, N]`.

    An all-to-all sends each token once to every process that owns one of its experts. Synchronizes with the device,
    because the host needs the numbers of tokens.
    """
    handle, num_processes = group.handle, problem["num_processes"]

    def exchange(
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        owners: Tensor,
        compute: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        is_owner = x.new_zeros(num_processes, len(x), dtype=torch.bool)
        is_owner.scatter_(0, owners[ids.long()].long().T, True)
        rows = is_owner.nonzero()[:, 1]  # of the first process, then of the second one, and so on
        num_sent = is_owner.sum(dim=1)
        num_received = torch.empty_like(num_sent)
        distributed.all_to_all_single(num_received, num_sent, group=handle)
        sent, received = num_sent.tolist(), num_received.tolist()

        def send(values: Tensor, num_in: list[int], num_out: list[int]) -> Tensor:
            result = values.new_empty(sum(num_in), values.shape[1])
            distributed.all_to_all_single(result, values, num_in, num_out, group=handle)
            return result

        tokens = send(x[rows], received, sent)
        routing = send(torch.cat((weights.view(torch.int32), ids), 1)[rows], received, sent)
        their_weights, their_ids = routing.chunk(2, dim=1)
        if len(tokens):
            their_weights = their_weights.contiguous().view(torch.float32)
            tokens = compute(tokens, their_weights, their_ids.contiguous())
        parts = send(tokens, sent, received)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        return total.index_add_(0, rows, parts.float()).to(x.dtype)

    return exchange
