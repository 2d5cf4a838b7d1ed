"""Reproducible sampling: the token of a row depends only on its logits, parameters, seed and position."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tokenspeed_core.api import Problem

Sample = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

# Constants of splitmix64 (Steele, Lea and Flood, 2014) as signed 64-bit integers, which wrap around.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def greedy(problem: Problem) -> Callable[[Tensor], Tensor]:
    """Return `greedy(logits [S, V]) -> ids int64 [S]`, the lowest id among equal logits."""
    del problem
    return _argmax


def sample(problem: Problem) -> Sample:
    """Return `sample(logits [S, V], temperature, top_k, top_p, min_p, seeds, positions) -> ids int64 [S]`.

    Filters in the order of transformers: temperature, top-k, then the smallest set with probability top-p, then the
    tokens with at least min-p times the highest probability. Samples by inverse transform of the sorted rest.
    """
    del problem
    return _sample


def note_tokens(problem: Problem) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]:
    """Return `note(logits [S, V], chosen int64 [S], slots int64 [S], last_token int32 [N], ids int32 [S]) -> None`.

    Sampling kernels choose a finite logit if a row has one, so a chosen logit that is not finite marks a bad row.
    """
    del problem
    return _note


def verify_drafts(problem: Problem) -> Callable[..., None]:
    """Return `verify(ids, token_ids, tokens, first, num_drafts, slots, ends, last_token, seq_len, num_new, max_drafts)`.

    Accepts draft tokens while they equal the chosen ones, and sets the slots' last tokens and lengths (see the
    contract).
    """
    del problem
    return _verify


def mask_logits(problem: Problem) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Return `mask(logits [S, V], rows int64 [P], words int32 [P, W]) -> None`."""
    del problem
    return _mask


def _mask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((words.unsqueeze(2) >> bits) & 1).flatten(1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill_(allowed == 0, float("-inf"))


def _verify(
    ids: Tensor,
    token_ids: Tensor,
    tokens: Tensor,
    first: Tensor,
    num_drafts: Tensor,
    slots: Tensor,
    ends: Tensor,
    last_token: Tensor,
    seq_len: Tensor,
    num_new: Tensor,
    max_drafts: int,
) -> None:
    # No draft token follows the last token of a row; `place` leaves it out below.
    following = token_ids[(tokens + 1).clamp_(max=len(token_ids) - 1)]
    place = torch.arange(max_drafts, device=ids.device)
    at = (first.unsqueeze(1) + place).clamp_(max=len(ids) - 1)
    is_equal = (ids == following)[at] & (place < num_drafts.unsqueeze(1))
    num_accepted = is_equal.to(torch.int32).cumprod(dim=1).sum(dim=1)
    last_token.index_copy_(0, slots, ids[first + num_accepted].clamp_(min=0))
    seq_len.index_copy_(0, slots, (ends - num_drafts + num_accepted).to(torch.int32))
    num_new.copy_(num_accepted + 1)


def _note(logits: Tensor, chosen: Tensor, slots: Tensor, last_token: Tensor, ids: Tensor) -> None:
    chosen = chosen.clamp(0, logits.shape[1] - 1)
    size = logits.gather(1, chosen.unsqueeze(1)).squeeze(1).abs()
    narrow = chosen.to(torch.int32)
    last_token.index_copy_(0, slots, narrow)
    ids.copy_(torch.where(size < float("inf"), narrow, -1))


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return a float32 in [0, 1) with 24 random bits for each int64 seed and position, by hashing both."""
    bits = _mix(_mix(seeds + _GOLDEN) + positions * _GOLDEN)
    return (_shift_right(bits, 40)).to(torch.float32) * 2.0**-24


def _argmax(logits: Tensor) -> Tensor:
    return logits.argmax(dim=-1)


def _sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    size = logits.shape[1]
    is_greedy = temperature == 0
    ordered, ids = torch.sort(logits.to(torch.float32), dim=-1, descending=True, stable=True)
    ordered = ordered / torch.where(is_greedy, 1.0, temperature).unsqueeze(1)
    p = torch.softmax(ordered, dim=-1, dtype=torch.float64)
    mass = p.cumsum(dim=-1)
    k = torch.where(top_k > 0, top_k, size).clamp_(max=size).masked_fill_(is_greedy, 1)
    k = k.to(torch.int64).unsqueeze(1)
    kept = torch.arange(size, device=logits.device) < k
    kept &= (mass - p) < top_p.unsqueeze(1) * mass.gather(1, k - 1)
    kept &= p >= min_p.unsqueeze(1) * p[:, :1]
    num_kept = kept.sum(dim=-1, keepdim=True).clamp_(min=1)
    target = uniform(seeds, positions).unsqueeze(1) * mass.gather(1, num_kept - 1)
    chosen = (mass <= target).sum(dim=-1, keepdim=True).clamp_(max=num_kept - 1)
    return ids.gather(1, chosen).squeeze(1)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Shift int64 right as if unsigned."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
