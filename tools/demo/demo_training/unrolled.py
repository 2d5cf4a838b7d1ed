"""Attention of a draft layer that is unrolled for several steps, as in EAGLE-3 ("training-time test", arXiv:2503.01840).

In the first step, row i of the layer reads the target's hidden state of token i. In each later step it reads the layer's
own output of row i - 1 in the step before, as in drafting.
"""

from __future__ import annotations

import torch
from torch import Tensor

Cache = list[tuple[Tensor, Tensor]]


def unrolled_mask(documents: Tensor, step: int) -> Tensor:
    """Return where a query of a step sees a row of the first step, bool [S, 1, T, T].

    Rows of different documents [S, T] do not see each other.
    """
    same = documents[:, None, :, None] == documents[:, None, None, :]
    place = torch.arange(documents.shape[1], device=documents.device)
    return same & (place[:, None] - place >= step)


def attend_unrolled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, cache: Cache) -> Tensor:
    """Attend from q [S, H, T, D], and append k [S, H, T, D] and v [S, H, T, V] to the cache of the steps before.

    `mask` is that of `unrolled_mask`. In step n, a query also sees the rows of the steps 1 to n that lead to it: in step
    s, n - s rows before its own. Returns [S, H, T, V].
    """
    cache.append((k, v))
    (first_k, first_v), *later = cache
    num_rows, step = q.shape[2], len(later)
    q = q * q.shape[-1] ** -0.5
    scores = [(q @ first_k.transpose(2, 3)).masked_fill(~mask, -torch.inf)]
    later = [
        (k.roll(step - place, dims=2), v.roll(step - place, dims=2))
        for place, (k, v) in enumerate(later, start=1)
    ]
    scores += [(q * k).sum(-1, keepdim=True) for k, _ in later]
    weights = torch.cat(scores, dim=-1).softmax(-1, dtype=torch.float32).to(v.dtype)
    out = weights[..., :num_rows] @ first_v
    for place, (_, v) in enumerate(later):
        out = out + weights[..., num_rows + place, None] * v
    return out
