"""Multi-head latent attention (MLA, DeepSeek-V2, arXiv:2405.04434, section 2.1) over a paged cache in plain torch.

Decodes absorb the expansion of keys into the queries, and that of values into the next projection, so that all heads
share one key per token, of which the first part is also the value. Prefills expand keys and values for each head.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.reference.cache import as_bytes, narrowed
from tokenspeed_kernels.reference.norm import rms_norm
from tokenspeed_kernels.reference.rope import rope

MlaDecode = Callable[..., Tensor]


def mla_write(problem: Problem) -> Callable[..., None]:
    """Return `write(q, kv, norm_weight, eps, positions, cos_sin, interleaved, cache, slots, kv_scale) -> None`.

    On CUDA, looking for slots of -1 synchronizes with the device.
    """
    latent_size, rope_size = problem["latent_size"], problem["rope_size"]
    block_size: int = problem["block_size"]
    norm = rms_norm({"size": latent_size, "dtype": problem["dtype"]})
    heads = {"num_heads": problem["num_heads"], "num_kv_heads": 1}
    sizes = {"head_size": rope_size, "rotary_size": rope_size}
    rotate = rope({**heads, **sizes, "dtype": problem["dtype"]})

    def write(
        q: Tensor,
        kv: Tensor,
        norm_weight: Tensor,
        eps: float,
        positions: Tensor,
        cos_sin: Tensor,
        interleaved: bool,
        cache: Tensor,
        slots: Tensor,
        kv_scale: float,
    ) -> None:
        latent = norm(kv[:, :latent_size], norm_weight, eps)
        key = kv[:, latent_size:].unsqueeze(1).clone()
        rotate(q[..., -rope_size:], key, positions, cos_sin, interleaved)
        entries = torch.cat((latent, key.squeeze(1)), dim=1)
        if kv_scale != 1.0:
            entries /= kv_scale
        if slots.numel() and slots.min() < 0:
            entries, slots = entries[slots >= 0], slots[slots >= 0]
        index = (slots // block_size, slots % block_size)
        as_bytes(cache).index_put_(index, as_bytes(narrowed(entries, cache.dtype)))

    return write


def mla_absorb(problem: Problem) -> Callable[[Tensor, Tensor], Tensor]:
    """Return `absorb(q [T, H, N + R], kv_up [H, N + V, L]) -> y [T, H, L + R]`."""
    latent_size, nope_size = problem["latent_size"], problem["nope_size"]
    width = latent_size + problem["rope_size"]

    def absorb(q: Tensor, kv_up: Tensor) -> Tensor:
        y = q.new_empty((*q.shape[:2], width))
        heads = q[..., :nope_size].transpose(0, 1)
        torch.bmm(heads, kv_up[:, :nope_size], out=y[..., :latent_size].transpose(0, 1))
        y[..., latent_size:] = q[..., nope_size:]
        return y

    return absorb


def mla_project(problem: Problem) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Return `project(x [T, H, L], kv_up [H, N + V, L], out [T, H, V]) -> None`."""
    nope_size = problem["nope_size"]

    def project(x: Tensor, kv_up: Tensor, out: Tensor) -> None:
        values = kv_up[:, nope_size:].transpose(1, 2)
        torch.bmm(x.transpose(0, 1), values, out=out.transpose(0, 1))

    return project


def mla_decode(problem: Problem) -> MlaDecode:
    """Return `decode(q, cache, block_table, seq_lens, max_seq_len, scale, shared) -> y [T, H, L]`, computed in float32.

    Each call gathers `max_seq_len` entries for every row, also those that are shared.
    """
    latent_size, block_size = problem["latent_size"], problem["block_size"]

    def decode(
        q: Tensor,
        cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        scale: float,
        shared: Tensor | None = None,
    ) -> Tensor:
        del shared
        blocks = block_table[:, : -(-max_seq_len // block_size)].clamp(0, cache.shape[0] - 1)
        entries = as_bytes(cache)[blocks].view(cache.dtype).flatten(1, 2).to(torch.float32)
        unseen = torch.arange(entries.shape[1], device=q.device) >= seq_lens.unsqueeze(1)
        entries.masked_fill_(unseen.unsqueeze(2), 0.0)  # NaN times a weight of 0 is NaN
        scores = torch.einsum("thd,tnd->thn", q.to(torch.float32), entries) * scale
        weights = scores.masked_fill(unseen.unsqueeze(1), float("-inf")).softmax(-1)
        weights.masked_fill_(unseen.unsqueeze(1), 0.0)  # for rows without keys
        return torch.einsum("thn,tnl->thl", weights, entries[..., :latent_size]).to(q.dtype)

    return decode


def mla_prefill(problem: Problem) -> Callable[..., None]:
    """Return `prefill(q, cache, kv_up, query_start, ..., out) -> None`, computed in float32 (see the contract).

    Expands `max_expanded` entries of a row at a time and merges the results by their log-sum-exps. Without the rows'
    lengths on the host, it reads them back from the device.
    """
    block_size, nope_size = problem["block_size"], problem["nope_size"]
    latent_size = problem["latent_size"]

    def prefill(
        q: Tensor,
        cache: Tensor,
        kv_up: Tensor,
        query_start: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        host_query_start: tuple[int, ...] | None,
        host_seq_lens: tuple[int, ...] | None,
        max_expanded: int,
        scale: float,
        out: Tensor,
    ) -> None:
        starts = host_query_start or query_start.tolist()
        lengths = host_seq_lens or seq_lens.tolist()
        out.zero_()
        up = kv_up.to(torch.float32)
        for row, (start, end) in enumerate(pairwise(starts)):
            if lengths[row] == 0 or start == end:
                continue
            queries = q[start:end].to(torch.float32)
            used = block_table[row, : -(-lengths[row] // block_size)]
            entries = as_bytes(cache)[used].view(cache.dtype).flatten(0, 1)[: lengths[row]]
            first = lengths[row] - (end - start)  # the position of the first query
            out[start:end] = attend_row(queries, entries, up, first, max_expanded, scale)

    def attend_row(
        q: Tensor, entries: Tensor, up: Tensor, first: int, max_expanded: int, scale: float
    ) -> Tensor:
        position = torch.arange(first, first + q.shape[0], device=q.device).unsqueeze(1)
        q_nope, q_rope = q[..., :nope_size], q[..., nope_size:]
        parts, sums = [], []
        for begin in range(0, entries.shape[0], max_expanded):
            chunk = entries[begin : begin + max_expanded].to(torch.float32)
            latents, shared = chunk[:, :latent_size], chunk[:, latent_size:]
            expanded = torch.einsum("hdl,nl->hnd", up, latents)
            keys, values = expanded[..., :nope_size], expanded[..., nope_size:]
            scores = torch.einsum("thd,hnd->htn", q_nope, keys)
            scores += torch.einsum("thr,nr->htn", q_rope, shared)
            unseen = torch.arange(begin, begin + len(chunk), device=q.device) > position
            scores = (scores * scale).masked_fill_(unseen, float("-inf"))
            sums.append(scores.logsumexp(-1))
            weights = (scores - sums[-1].unsqueeze(-1)).exp().nan_to_num_(0.0)
            parts.append(weights @ values)
        total = torch.stack(sums).softmax(0).unsqueeze(-1)
        merged = (torch.stack(parts) * total).sum(0)
        return merged.transpose(0, 1)

    return prefill
