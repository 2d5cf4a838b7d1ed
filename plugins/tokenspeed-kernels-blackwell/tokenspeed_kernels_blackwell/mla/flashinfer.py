"""The op `mla_decode` with the TensorRT-LLM kernels in FlashInfer (Ye et al., 2025, arXiv:2501.01005)."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels_blackwell.attention.trtllm import MAX_MULTIPROCESSORS, WORKSPACE_BYTES

MAX_ROWS = 4096  # rows with counters; they take 16 KiB per head
NOPE_SIZE = 128  # required by the library's signature, not used by these kernels


class FlashInferMlaDecode:
    """The op `mla_decode` for all layers of one problem on one device.

    The first call allocates the workspace, so it must not be captured in a CUDA graph.
    """

    def __init__(self, problem: Problem) -> None:
        self._decode = import_module("flashinfer.mla").trtllm_batch_decode_with_kv_cache_mla
        self._num_heads, self._latent_size = problem["num_heads"], problem["latent_size"]
        self._rope_size = problem["rope_size"]
        self._shared: dict[str, Tensor] = {}

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
        """Attend as in the op's contract, without use of `shared`. Raises ValueError for more than `MAX_ROWS` rows."""
        del shared
        num_rows = q.shape[0]
        if num_rows > MAX_ROWS:
            raise ValueError(f"mla_decode by flashinfer supports {MAX_ROWS} rows, got {num_rows}")
        if num_rows == 0:
            return q.new_empty((0, self._num_heads, self._latent_size))
        if not self._shared:
            self._shared = self._allocate(q.device)
        y: Tensor = self._decode(
            query=q.unsqueeze(1),
            kv_cache=cache,
            qk_nope_head_dim=NOPE_SIZE,
            kv_lora_rank=self._latent_size,
            qk_rope_head_dim=self._rope_size,
            block_tables=block_table.contiguous(),  # the library assumes this
            seq_lens=seq_lens,
            max_seq_len=max(max_seq_len, 1),
            bmm1_scale=scale,
            bmm2_scale=1.0,
            backend="trtllm-gen",
            **self._shared,
        )
        # Results of rows without keys are not documented, and NaN in padding rows would spread.
        return y.squeeze(1).masked_fill_((seq_lens == 0).view(-1, 1, 1), 0.0)

    def _allocate(self, device: torch.device) -> dict[str, Tensor]:
        """Allocate the workspace. Each call leaves the counters zero."""
        num_counters = max(MAX_ROWS * self._num_heads, MAX_MULTIPROCESSORS)
        return {
            "workspace_buffer": torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device),
            "multi_ctas_kv_counter_buffer": torch.zeros(
                num_counters, dtype=torch.int32, device=device
            ),
        }


def mla_decode(problem: Problem) -> FlashInferMlaDecode:
    """Build the kernel. Raises ImportError if the library cannot be loaded."""
    return FlashInferMlaDecode(problem)
