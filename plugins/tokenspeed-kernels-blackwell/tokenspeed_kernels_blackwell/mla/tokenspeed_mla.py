"""The op `mla_decode` with the CuTe DSL kernels of the third-party library `tokenspeed-mla`."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from tokenspeed_core.api import Problem

# Partial results in float32 of up to 128 heads and 513 values, for two splits per multiprocessor.
WORKSPACE_BYTES = 2 * 160 * 128 * 513 * 4


class TokenspeedMlaDecode:
    """The op `mla_decode` for all layers of one problem on one device.

    The first call allocates the workspace and compiles, so it must not be captured in a CUDA graph.
    """

    def __init__(self, problem: Problem) -> None:
        self._decode = import_module("tokenspeed_mla").tokenspeed_mla_decode
        self._num_heads, self._latent_size = problem["num_heads"], problem["latent_size"]
        self._rope_size = problem["rope_size"]
        self._workspace: Tensor | None = None

    def __call__(
        self,
        q: Tensor,
        cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        scale: float,
        shared: Tensor | None = None,
    ) -> Tensor:
        """Attend as in the op's contract, without use of `shared`."""
        del shared
        if q.shape[0] == 0:
            return q.new_empty((0, self._num_heads, self._latent_size))
        if self._workspace is None:
            self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.int8, device=q.device)
        y: Tensor = self._decode(
            query=q.unsqueeze(1),
            kv_cache=cache,
            workspace_buffer=self._workspace,
            kv_lora_rank=self._latent_size,
            qk_rope_head_dim=self._rope_size,
            block_tables=block_table.contiguous(),  # the library assumes this
            seq_lens=seq_lens,
            max_seq_len=max(max_seq_len, 1),
            softmax_scale=scale,
        )
        # Results of rows without keys are not documented, and NaN in padding rows would spread.
        return y.squeeze(1).masked_fill_((seq_lens == 0).view(-1, 1, 1), 0.0)


def mla_decode(problem: Problem) -> TokenspeedMlaDecode:
    """Build the kernel. Raises ImportError if the library cannot be loaded."""
    return TokenspeedMlaDecode(problem)
