"""Fused all-reduces: norms that first add up the summands (partial sums) of all processes, and layers that send them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch

from tokenspeed_core.api import BuildContext, FusedCollective, SentSummands
from tokenspeed_models.layers.linear import Activation, Linear


@runtime_checkable
class TakesSummands(Protocol):
    """A block whose input may be a summand, because the norm before it can add up those of all processes."""

    @property
    def fused_op(self) -> str:
        """The op that adds up and normalizes summands for the block: FUSED_OP, or one that also quantizes."""

    def fuse_sum(self, build: BuildContext, fused: FusedCollective) -> None:
        """Take summands [T, hidden] from now on. The norm before the block does so too, unless `fused` quantizes."""


def sum_before(
    fused: FusedCollective,
    separate: Callable[..., Any],
    of_normed: Callable[[Any], Any] | None = None,
) -> Callable[..., Any]:
    """Return `separate(x, residual, weight, eps, ...) -> (result, residual)` for summands x of all processes.

    One kernel adds up and normalizes at most `fused.max_num_tokens` rows. `of_normed` computes the result from the
    normalized rows, or from values and scales if the kernel quantizes; None: the rows are the result. More rows are added
    up first. Summands that a layer has sent in parts are received.
    """
    kernel, all_reduce, max_num_tokens = fused.kernel, fused.all_reduce, fused.max_num_tokens
    quantizes, overlap = fused.quantizes, fused.overlap

    def run(
        x: torch.Tensor | SentSummands,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *operands: Any,
    ) -> Any:
        if isinstance(x, SentSummands):
            assert overlap is not None
            *parts, residual = overlap.receive(x, residual, weight, eps)
        elif x.shape[0] > max_num_tokens:
            return separate(all_reduce(x), residual, weight, eps, *operands)
        else:
            *parts, residual = kernel(x, residual, weight, eps)
        normed = tuple(parts) if quantizes else parts[0]
        return normed if of_normed is None else of_normed(normed), residual

    return run


def send_in_parts(linear: Linear, fused: FusedCollective) -> Callable[[Activation], Any]:
    """Return a layer that computes many rows in parts, and sends each part to the other processes at once.

    It returns SentSummands for many rows, and a tensor [T, out] for few, or for more than the kernel adds up.
    """
    overlap, max_num_tokens = fused.overlap, fused.max_num_tokens
    assert overlap is not None
    min_num_tokens = overlap.min_num_tokens

    def run(x: Activation) -> Any:
        rows = x[0] if isinstance(x, tuple) else x
        if not min_num_tokens <= rows.shape[0] <= max_num_tokens:
            return linear(x)
        return overlap.send(linear, x)

    return run
