"""Mixture of experts: routing, and running the experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from tokenspeed_core.api import Problem

Route = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def moe_route(problem: Problem) -> Route:
    """Return `route(logits [T, E], bias [E] | None) -> (weights float32 [T, k], ids int32 [T, k])`.

    Raises ValueError for groups that do not divide the experts or that hold fewer than k of them.
    """
    score, scale, renormalize = problem["score"], problem["scale"], problem["renormalize"]
    top_k, num_groups, top_groups = problem["top_k"], problem["num_groups"], problem["top_groups"]
    group_score = GROUP_SCORES[problem["group_score"]]
    group_size = problem["num_experts"] // num_groups
    if problem["num_experts"] % num_groups or not num_groups >= top_groups >= 1:
        raise ValueError(
            f"num_experts is {problem['num_experts']}, num_groups {num_groups} and top_groups {top_groups}; "
            "expected a multiple of num_groups, and top_groups from 1 to num_groups"
        )
    if top_groups * group_size < top_k:
        raise ValueError(
            f"{top_groups} groups of {group_size} experts have fewer experts than top_k, {top_k}"
        )

    def route(logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        scores = SCORES[score](logits.to(torch.float32))
        ranking = scores if bias is None else scores + bias
        if top_groups < num_groups:
            groups = ranking.view(-1, num_groups, group_size)
            chosen = _first(group_score(groups), top_groups)
            is_out = torch.ones(groups.shape[:2], dtype=torch.bool, device=logits.device)
            is_out.scatter_(1, chosen, False)
            ranking = groups.masked_fill(is_out.unsqueeze(2), float("-inf")).flatten(1)
        ids = _first(ranking, top_k)
        weights = scores.gather(1, ids)
        if score == "top_k_softmax":
            weights = weights.softmax(dim=1)
        if renormalize:
            weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
        return weights * scale, ids.to(torch.int32)

    return route


def _first(values: Tensor, num: int) -> Tensor:
    """Return the indices of the `num` largest of each row, in descending order, the lower index first among equals."""
    return torch.sort(values, dim=1, descending=True, stable=True).indices[:, :num].contiguous()


SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": partial(torch.softmax, dim=1),
    "sigmoid": torch.sigmoid,
    "top_k_softmax": lambda logits: logits,
}
GROUP_SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "max": lambda groups: groups.amax(dim=2),
    "top_2_sum": lambda groups: groups.topk(min(2, groups.shape[2]), dim=2).values.sum(dim=2),
}


def moe_logits(problem: Problem) -> Callable[[Tensor, Tensor], Tensor]:
    """Return `logits(x [T, N], weight float32 [E, N]) -> y float32 [T, E]`."""
    del problem
    return lambda x, weight: functional.linear(x.to(torch.float32), weight)


def moe_experts(problem: Problem) -> Experts:
    """Return `experts(x [T, N], gate_up [E, 2I, N], down [E, N, I], weights [T, k], ids [T, k]) -> y [T, N]`.

    Runs each expert on its tokens. On CUDA this synchronizes with the device to find the experts that have tokens.
    """
    inner: int = problem["intermediate_size"]

    def experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert, tokens, weight in with_tokens(ids, weights, len(down)):
            hidden = functional.linear(x[tokens], gate_up[expert])
            hidden = functional.linear(
                functional.silu(hidden[:, :inner]) * hidden[:, inner:], down[expert]
            )
            y.index_add_(0, tokens, hidden.to(torch.float32) * weight)
        return y.to(x.dtype)

    return experts


def with_tokens(
    ids: Tensor, weights: Tensor, num_experts: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each expert that has tokens, with the tokens int64 [t] and their routing weights [t, 1].

    An id of `num_experts` means no expert.
    """
    order, start = ids.flatten().argsort(stable=True), 0
    counts = torch.bincount(ids.flatten(), minlength=num_experts + 1).tolist()
    for expert, count in enumerate(counts[:num_experts]):
        if count:
            chosen = order[start : start + count]
            yield expert, chosen // ids.shape[1], weights.flatten()[chosen].unsqueeze(1)
            start += count
