"""Gather a step's keys and values from their blocks into contiguous memory.

FlashAttention-3 loads contiguous keys with TMA, but computes the addresses of paged keys itself, which takes about
10 % longer. Each row is followed by PADDING zeros: the library's tiles read beyond the end of a row, and stale values
there could be NaN.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tokenspeed_core.api import AttentionStep
from tokenspeed_kernels_hopper.gather_kernel import copy_rows

PADDING = 256  # more tokens than a tile of the library
TOKENS, NUM_WARPS = 8, 8  # per program


class Gathered:
    """Gathered keys and values of one layer at a time.

    `keys`, `values` [tokens, K, D]; `starts` int32 [S + 1], the first token of each row.
    """

    def __init__(
        self,
        num_tokens: int,
        max_num_rows: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate for rows of `num_tokens` tokens in total, including the padding of each."""
        self.keys, self.values = torch.empty(
            (2, num_tokens, num_kv_heads, head_size), dtype=dtype, device=device
        )
        self._starts = self.starts = torch.zeros(max_num_rows + 1, dtype=torch.int32, device=device)

    def has_room(self, step: AttentionStep) -> bool:
        """Return whether the rows of a step fit. The host must know their lengths."""
        assert step.host_seq_lens is not None, "captured steps are not gathered"
        return sum(step.host_seq_lens) + step.num_rows * PADDING <= len(self.keys)

    def place(self, step: AttentionStep) -> None:
        """Compute the start of each row on the device, without synchronizing."""
        self.starts = self._starts[: step.num_rows + 1]
        torch.cumsum(step.seq_lens + PADDING, 0, dtype=torch.int32, out=self.starts[1:])

    def fill(self, step: AttentionStep, k_cache: Tensor, v_cache: Tensor) -> None:
        """Copy the rows of a step from one layer's caches [B, block_size, K, D], which have equal strides."""
        assert k_cache.stride() == v_cache.stride(), (
            "k_cache and v_cache must have the same strides"
        )
        size = k_cache.shape[2] * k_cache.shape[3]
        copy_rows[(triton.cdiv(step.max_seq_len + PADDING, TOKENS), step.num_rows)](
            k_cache,
            v_cache,
            self.keys,
            self.values,
            self.starts,
            step.seq_lens,
            step.block_table,
            k_cache.stride(0),
            step.block_table.stride(0),
            SIZE=size,
            COLUMNS=triton.next_power_of_2(size),
            BLOCK_SIZE=k_cache.shape[1],
            TOKENS=TOKENS,
            PADDING=PADDING,
            num_warps=NUM_WARPS,
        )
