"""The backend `blackwell` of the op `mla_decode`, by the Triton kernels of `latent_kernel`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenspeed_core.api import Problem
from tokenspeed_kernels_blackwell.mla.decode_kernel import attend, merge
from tokenspeed_kernels_blackwell.mla.reference import LatentDecode

TAIL = 16  # entries that are masked at once
NUM_STAGES = 2  # blocks in flight, within the 227 KiB of shared memory
MULTIPROCESSORS = 148  # of a B200; programs beyond it wait
MIN_SHARE = 256  # tokens for which a program of its own is worth the merging
MAX_SPLITS = 32
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Tiling:
    """Heads of a tile, warps of a program."""

    block_h: int
    num_warps: int


FEW, MANY = Tiling(16, 4), Tiling(32, 8)
"""For up to 16 heads, and for more, where fewer tiles read the cache; of 64 the sums do not fit into registers."""


def mla_decode(problem: Problem) -> LatentDecode:
    """Return `decode(q, cache, block_table, seq_lens, max_seq_len, scale) -> y [T, H, L]`, as the contract says."""
    num_heads, latent_size, rope_size = (
        problem["num_heads"],
        problem["latent_size"],
        problem["rope_size"],
    )
    block_size = problem["block_size"]
    tiling = FEW if num_heads <= FEW.block_h else MANY
    num_tiles = triton.cdiv(num_heads, tiling.block_h)

    def decode(
        q: Tensor,
        cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        scale: float,
    ) -> Tensor:
        num_rows = q.shape[0]
        y = torch.empty((num_rows, num_heads, latent_size), dtype=q.dtype, device=q.device)
        if num_rows == 0:
            return y
        splits = num_splits(num_rows * num_tiles, max_seq_len)
        lse = torch.empty((num_rows, num_heads, splits), dtype=torch.float32, device=q.device)
        part = (
            y
            if splits == 1
            else torch.empty((*lse.shape, latent_size), dtype=torch.float32, device=q.device)
        )
        attend[(num_tiles, num_rows, splits)](
            q,
            *_boxes(cache, block_size, latent_size, rope_size),
            *_boxes(cache, TAIL, latent_size, rope_size),
            part,
            lse,
            seq_lens,
            block_table,
            scale * LOG2_E,
            q.stride(0),
            q.stride(1),
            block_table.stride(0),
            H=num_heads,
            L=latent_size,
            R=rope_size,
            BLOCK_SIZE=block_size,
            BLOCK_H=tiling.block_h,
            TAIL=TAIL,
            num_warps=tiling.num_warps,
            num_stages=NUM_STAGES,
        )
        if splits > 1:
            merge[(num_rows * num_heads,)](part, lse, y, splits, L=latent_size, SPLITS=MAX_SPLITS)
        return y

    return decode


def num_splits(num_programs: int, max_seq_len: int) -> int:
    """Return over how many programs a row is split, so that about all multiprocessors have one."""
    wanted = MULTIPROCESSORS // num_programs
    return max(1, min(wanted, max_seq_len // MIN_SHARE, MAX_SPLITS))


def _boxes(cache: Tensor, num_entries: int, *widths: int) -> Iterator[TensorDescriptor]:
    """Describe a cache [B, block_size, L + R] to the tensor memory accelerator, once for each width of a box."""
    for width in widths:
        yield TensorDescriptor(
            cache, list(cache.shape), list(cache.stride()), [1, num_entries, width]
        )
