"""Sampling on CPUs that sorts only the most probable tokens of a row; the reference sorts the whole vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.reference.sampling import Sample, uniform
from tokenspeed_kernels.reference.sampling import sample as reference

HEAD = 256  # tokens per row that are sorted


def sample(problem: Problem) -> Sample:
    """Return `sample(logits [S, V], temperature, top_k, top_p, min_p, seeds, positions) -> ids int64 [S]`.

    Rows with a cutoff or a sampled token outside the head go through the reference.
    """
    size: int = problem["vocab_size"]
    whole = reference(problem)

    def sample_rows(
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
    ) -> Tensor:
        columns = (logits, temperature, top_k, top_p, min_p, seeds, positions)
        if size <= HEAD:
            return whole(*columns)
        ids, is_found = _from_heads(*columns)
        if not is_found.all():
            rest = ~is_found
            ids[rest] = whole(*(column[rest] for column in columns))
        return ids

    return sample_rows


def _from_heads(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the ids, and whether each needs only its row's head. Probabilities are relative to the most probable token."""
    values, ids = _sorted_heads(logits)
    is_greedy = temperature == 0
    scale = torch.where(is_greedy, 1.0, temperature).unsqueeze(1)
    p = ((values - values[:, :1]) / scale).to(torch.float64).exp_()
    mass = p.cumsum(dim=-1)
    total = ((logits - values[:, :1]) / scale).exp_().sum(dim=-1, keepdim=True, dtype=torch.float64)

    # Tokens whose logit equals the smallest in the head may be missing from the head.
    num_certain = (values > values[:, -1:]).sum(dim=-1, keepdim=True)
    k = top_k.masked_fill(is_greedy, 1).to(torch.int64).unsqueeze(1)
    is_limited = (k > 0) & (k <= num_certain)
    mass_k = torch.where(is_limited, mass.gather(1, (k - 1).clamp_(0, HEAD - 1)), total)
    max_kept = torch.where(is_limited, k, num_certain)
    kept = torch.arange(HEAD) < max_kept
    kept &= (mass - p) < top_p.unsqueeze(1) * mass_k
    kept &= p >= min_p.unsqueeze(1)
    num_kept = kept.sum(dim=-1, keepdim=True).clamp_(min=1)

    is_cut = is_limited | (num_kept < max_kept)
    is_free = (
        ((k <= 0) | (k >= logits.shape[1])) & (top_p >= 1).unsqueeze(1) & (min_p <= 0).unsqueeze(1)
    )
    target = uniform(seeds, positions).unsqueeze(1) * torch.where(
        is_cut, mass.gather(1, num_kept - 1), total
    )
    chosen = (mass <= target).sum(dim=-1, keepdim=True)
    is_certain = ((k <= num_certain) | is_free) & (is_cut | (is_free & (chosen < num_certain)))
    chosen = torch.minimum(chosen, num_kept - 1)
    return ids.gather(1, chosen).squeeze(1), is_certain.squeeze(1)


def _sorted_heads(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the HEAD largest logits of each row and their ids, in descending order, lower ids first among equals."""
    _, ids = logits.topk(HEAD, dim=-1, sorted=False)
    ids = ids.sort(dim=-1).values
    values, order = (
        logits.gather(1, ids).to(torch.float32).sort(dim=-1, descending=True, stable=True)
    )
    return values, ids.gather(1, order)
