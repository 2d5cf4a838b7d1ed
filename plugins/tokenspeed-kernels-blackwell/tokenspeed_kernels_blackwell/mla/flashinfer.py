"""Latent attention by the kernels that FlashInfer (Ye et al. 2025, arXiv:2501.01005) takes from TensorRT-LLM."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels_blackwell.attention.trtllm import MAX_MULTIPROCESSORS, WORKSPACE_BYTES

MAX_ROWS = 4096  # for which counters are allocated: 16 KiB a head
NOPE_SIZE = 128  # of DeepSeek's heads before absorption; these kernels do not read it


class FlashInferLatentDecode:
    """The op `mla_decode`, for all layers of one problem on one device.

    What calls share is allocated by the first one, which must not be captured in a graph.
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
    ) -> Tensor:
        """Attend, as the op's contract says. Raises ValueError on more than `MAX_ROWS` rows."""
        num_rows = q.shape[0]
        if num_rows > MAX_ROWS:
            raise ValueError(
                f"{num_rows} rows of one query; the counters of this backend are for {MAX_ROWS}"
            )
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
            block_tables=block_table.contiguous(),  # the library takes a row's length for its stride
            seq_lens=seq_lens,
            max_seq_len=max(max_seq_len, 1),
            bmm1_scale=scale,
            bmm2_scale=1.0,
            backend="trtllm-gen",
            **self._shared,
        )
        # What the library gives for a row without keys is not documented; NaN in a padding row would spread.
        return y.squeeze(1).masked_fill_((seq_lens == 0).view(-1, 1, 1), 0.0)

    def _allocate(self, device: torch.device) -> dict[str, Tensor]:
        """Return the memory that each call leaves as it found it: zeros where it counts."""
        num_counters = max(MAX_ROWS * self._num_heads, MAX_MULTIPROCESSORS)
        return {
            "workspace_buffer": torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device),
            "multi_ctas_kv_counter_buffer": torch.zeros(
                num_counters, dtype=torch.int32, device=device
            ),
        }


def mla_decode(problem: Problem) -> FlashInferLatentDecode:
    """Build the kernel of a problem. Raises ImportError where the library cannot be loaded."""
    return FlashInferLatentDecode(problem)
