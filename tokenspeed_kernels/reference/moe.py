"""Mixture of experts: routing, and running the experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from tokenspeed_core.api import Problem
from tokenspeed_kernels.reference.fp8 import linear_fp8, quantize_rows

Route = Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]
Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
ExpertsFp8 = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def moe_route(problem: Problem) -> Route:
    """Return `route(logits [T, E], top_k, renormalize) -> (weights float32 [T, k], ids int32 [T, k])`."""
    del problem

    def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
        weights, ids = torch.sort(probabilities, dim=-1, descending=True, stable=True)
        weights, ids = weights[:, :top_k], ids[:, :top_k]
        if renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.contiguous(), ids.to(torch.int32)

    return route


def moe_experts(problem: Problem) -> Experts:
    """Return `experts(x [T, N], gate_up [E, 2I, N], down [E, N, I], weights [T, k], ids [T, k]) -> y [T, N]`.

    Runs each expert on its tokens. On CUDA this synchronises with the device to learn which experts have any.
    """
    inner: int = problem["intermediate_size"]

    def experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert, tokens, weight in _with_tokens(ids, weights):
            hidden = functional.linear(x[tokens], gate_up[expert])
            hidden = functional.linear(
                functional.silu(hidden[:, :inner]) * hidden[:, inner:], down[expert]
            )
            y.index_add_(0, tokens, hidden.to(torch.float32) * weight)
        return y.to(x.dtype)

    return experts


def moe_experts_fp8(problem: Problem) -> ExpertsFp8:
    """Return `experts(x, gate_up, gate_up_scale, down, down_scale, weights, ids) -> y [T, N]`.

    Like `moe_experts` it synchronises with the device. Each call converts the weights of its experts to float32.
    """
    inner: int = problem["intermediate_size"]
    multiply = linear_fp8({"dtype": "float32"})

    def experts(
        x: Tensor,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        down: Tensor,
        down_scale: Tensor,
        weights: Tensor,
        ids: Tensor,
    ) -> Tensor:
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        codes, scale = quantize_rows(x)
        for expert, tokens, weight in _with_tokens(ids, weights):
            both = multiply(
                codes[tokens], scale[tokens], gate_up[expert], gate_up_scale[expert], None
            )
            hidden = (functional.silu(both[:, :inner]) * both[:, inner:]).to(x.dtype)
            y.index_add_(
                0,
                tokens,
                multiply(*quantize_rows(hidden), down[expert], down_scale[expert], None) * weight,
            )
        return y.to(x.dtype)

    return experts


def _with_tokens(ids: Tensor, weights: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each expert that has tokens, with the tokens int64 [t] and their routing weights [t, 1]."""
    order, start = ids.flatten().argsort(stable=True), 0
    for expert, count in enumerate(torch.bincount(ids.flatten()).tolist()):
        if count:
            chosen = order[start : start + count]
            yield expert, chosen // ids.shape[1], weights.flatten()[chosen].unsqueeze(1)
            start += count
