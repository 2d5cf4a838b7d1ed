"""Multi-head latent attention (MLA) over a paged cache in plain torch, the reference of `mla_decode`.

From DeepSeek-V2 (arXiv:2405.04434, section 2.1), with the up-projections of keys and values absorbed into the
projections before and after. All heads then share one key per token, and its first part is also the value.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tokenspeed_core.api import Problem

MlaDecode = Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]


def mla_decode(problem: Problem) -> MlaDecode:
    """Return `decode(q, cache, block_table, seq_lens, max_seq_len, scale) -> y [T, H, L]`, computed in float32.

    Each call gathers `max_seq_len` entries for every row.
    """
    latent_size, block_size = problem["latent_size"], problem["block_size"]

    def decode(
        q: Tensor,
        cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        scale: float,
    ) -> Tensor:
        blocks = block_table[:, : -(-max_seq_len // block_size)].clamp(0, cache.shape[0] - 1)
        entries = cache[blocks].flatten(1, 2).to(torch.float32)
        unseen = torch.arange(entries.shape[1], device=q.device) >= seq_lens.unsqueeze(1)
        entries.masked_fill_(unseen.unsqueeze(2), 0.0)  # NaN times a weight of 0 is NaN
        scores = torch.einsum("thd,tnd->thn", q.to(torch.float32), entries) * scale
        weights = scores.masked_fill(unseen.unsqueeze(1), float("-inf")).softmax(-1)
        weights.masked_fill_(unseen.unsqueeze(1), 0.0)  # for rows without keys
        return torch.einsum("thn,tnl->thl", weights, entries[..., :latent_size]).to(q.dtype)

    return decode
