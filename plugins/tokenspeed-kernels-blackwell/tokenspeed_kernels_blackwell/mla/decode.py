"""The backend `blackwell` of the op `mla_decode`, with the Triton kernels of `decode_kernel`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenspeed_core.api import Problem
from tokenspeed_kernels_blackwell.mla.decode_kernel import attend, merge

TAIL = 16  # entries per iteration in a row's last block, where masking is needed
NUM_STAGES = 2  # pipeline stages, within the 227 KiB of shared memory
MULTIPROCESSORS = 148  # of a B200
MIN_SHARE = 256  # minimum tokens per split; with fewer, merging costs more than the split saves
MAX_SPLITS = 32
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Tiling:
    """Heads per tile, and warps."""

    block_h: int
    num_warps: int


# For up to 16 heads, and for more. Larger tiles read the cache fewer times, but 64 heads do not fit into registers.
FEW, MANY = Tiling(16, 4), Tiling(32, 8)


def mla_decode(problem: Problem) -> Callable[..., Tensor]:
    """Return `decode(q, cache, block_table, seq_lens, max_seq_len, scale, shared) -> y [T, H, L]` (see the op's contract)."""
    num_heads: int = problem["num_heads"]
    latent_size: int = problem["latent_size"]
    rope_size: int = problem["rope_size"]
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
        shared: Tensor | None = None,
    ) -> Tensor:
        del shared
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
    """Return the number of splits per row that gives about one program per multiprocessor."""
    wanted = MULTIPROCESSORS // num_programs
    return max(1, min(wanted, max_seq_len // MIN_SHARE, MAX_SPLITS))


def _boxes(cache: Tensor, num_entries: int, *widths: int) -> Iterator[TensorDescriptor]:
    """Yield a TMA descriptor of a cache [B, block_size, L + R] for each box width."""
    for width in widths:
        yield TensorDescriptor(
            cache, list(cache.shape), list(cache.stride()), [1, num_entries, width]
        )
