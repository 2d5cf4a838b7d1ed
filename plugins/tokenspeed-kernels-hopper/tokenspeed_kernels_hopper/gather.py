"""A step's cached keys and values, copied from their blocks to where each row's stand one after another.

The library copies tiles of contiguous keys with the tensor memory accelerator and computes the addresses of paged ones
by itself, which takes a tenth longer. Each row is followed by ROOM zeros: a tile reads behind its row's end, and what
it finds there, times a weight of zero, must not be NaN.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tokenspeed_core.api import AttentionStep
from tokenspeed_kernels_hopper.gather_kernel import copy_rows

ROOM = 256  # more tokens than a tile of the library's has
TOKENS, NUM_WARPS = 8, 8  # of one program


class Gathered:
    """Memory for the keys and values of one layer at a time, and where each row's start.

    `keys`, `values` [tokens, K, D]; `starts` int32 [rows + 1].
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
        """Allocate for rows of `num_tokens` tokens in all, the room behind each of them included."""
        self.keys, self.values = torch.empty(
            (2, num_tokens, num_kv_heads, head_size), dtype=dtype, device=device
        )
        self._starts = self.starts = torch.zeros(max_num_rows + 1, dtype=torch.int32, device=device)

    def holds(self, step: AttentionStep) -> bool:
        """Say whether the rows of a step fit, whose lengths the host knows."""
        assert step.host_seq_lens is not None, "of steps that are not captured"
        return sum(step.host_seq_lens) + step.num_rows * ROOM <= len(self.keys)

    def place(self, step: AttentionStep) -> None:
        """Find where the rows of a step start. Waits for nothing."""
        self.starts = self._starts[: step.num_rows + 1]
        torch.cumsum(step.seq_lens + ROOM, 0, dtype=torch.int32, out=self.starts[1:])

    def fill(self, step: AttentionStep, k_cache: Tensor, v_cache: Tensor) -> None:
        """Copy what the rows of a step have in one layer's caches [B, block_size, K, D], strided alike on B."""
        assert k_cache.stride() == v_cache.stride(), "k and v of a block lie in one arena"
        size = k_cache.shape[2] * k_cache.shape[3]
        copy_rows[(triton.cdiv(step.max_seq_len + ROOM, TOKENS), step.num_rows)](
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
            ROOM=ROOM,
            num_warps=NUM_WARPS,
        )
