"""Mixture of experts: choosing a token's experts, and running them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from tokenspeed_core.api import Problem

Route = Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]
Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


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

    Runs each expert that has tokens on those tokens, which costs a wait for the device where there is one.
    """
    inner: int = problem["intermediate_size"]

    def experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        order = ids.flatten().argsort(stable=True)
        counts = torch.bincount(ids.flatten(), minlength=gate_up.shape[0]).tolist()
        flat_weights = weights.flatten()
        start = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            chosen = order[start : start + count]
            start += count
            tokens = chosen // ids.shape[1]
            hidden = functional.linear(x[tokens], gate_up[expert])
            hidden = functional.linear(functional.silu(hidden[:, :inner]) * hidden[:, inner:], down[expert])
            y.index_add_(0, tokens, hidden.to(torch.float32) * flat_weights[chosen].unsqueeze(1))
        return y.to(x.dtype)

    return experts
