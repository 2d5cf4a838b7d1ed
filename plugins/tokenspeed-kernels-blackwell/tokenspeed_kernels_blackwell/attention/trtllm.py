"""Paged attention with the TensorRT-LLM kernels in FlashInfer (Ye et al., 2025, arXiv:2501.01005)."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from tokenspeed_core.api import AttentionLimits, AttentionProblem, AttentionStep

# For partial results of split rows. FlashInfer's own tests use this size.
WORKSPACE_BYTES = 128 * 2**20
# Lower bound of the number of counters: the library has one per multiprocessor, or per row and head.
MAX_MULTIPROCESSORS = 512


class FlashInferAttention:
    """Attention for rows with equal query lengths ("decode") or any query lengths ("prefill").

    For prefill the library needs the cumulative KV lengths, which `prepare` computes on the device into a fixed
    buffer. For decode `prepare` only keeps the step.
    """

    def __init__(
        self, problem: AttentionProblem, limits: AttentionLimits, device: torch.device
    ) -> None:
        self.prepares_on_host = problem.phase == "decode"
        self._problem = problem
        self._decode = import_module("flashinfer.decode").trtllm_batch_decode_with_kv_cache
        self._prefill = import_module("flashinfer.prefill").trtllm_batch_context_with_kv_cache
        num_counters = max(limits.max_num_rows * problem.num_heads, MAX_MULTIPROCESSORS)
        # Shared by all layers. Each call leaves the counters zero.
        self._shared = {
            "workspace_buffer": torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device),
            "multi_ctas_kv_counter_buffer": torch.zeros(
                -(-num_counters // 8) * 8, dtype=torch.int32, device=device
            ),
        }
        self._key_start = torch.zeros(limits.max_num_rows + 1, dtype=torch.int32, device=device)
        self._step: AttentionStep | None = None

    def prepare(self, step: AttentionStep) -> None:
        """Keep the step; for prefill, also compute the cumulative KV lengths."""
        self._step = step
        if not self.prepares_on_host:
            torch.cumsum(
                step.seq_lens, 0, dtype=torch.int32, out=self._key_start[1 : step.num_rows + 1]
            )

    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        """Attend. q, out [T, H, D]; caches [B, block_size, K, D], strided on B."""
        problem, step = self._problem, self._step
        assert step is not None, "forward before prepare"
        assert step.block_table.is_contiguous(), "the library assumes a contiguous block table"
        common = {
            **self._shared,
            "kv_cache": (k_cache, v_cache),
            "kv_layout": "NHD",
            "block_tables": step.block_table,
            "seq_lens": step.seq_lens,
            "bmm1_scale": problem.scale,
            "bmm2_scale": 1.0,
            "window_left": -1 if problem.window is None else problem.window - 1,
            "backend": "trtllm-gen",
        }
        if problem.phase == "decode":
            num_tokens = step.num_rows * step.max_num_query
            self._decode(
                query=q[:num_tokens],
                out=out[:num_tokens],
                max_seq_len=step.max_seq_len,
                q_len_per_req=step.max_num_query,
                **common,
            )
        else:
            self._prefill(
                query=q,
                out=out,
                max_q_len=step.max_num_query,
                max_kv_len=step.max_seq_len,
                batch_size=step.num_rows,
                cum_seq_lens_q=step.query_start,
                cum_seq_lens_kv=self._key_start[: step.num_rows + 1],
                **common,
            )


def attention(
    problem: AttentionProblem, limits: AttentionLimits, device: torch.device
) -> FlashInferAttention:
    """Build the backend (an AttentionFactory). Raises ImportError if the library cannot be loaded."""
    if problem.num_heads % problem.num_kv_heads:
        raise ValueError(
            f"num_heads ({problem.num_heads}) is not a multiple of num_kv_heads ({problem.num_kv_heads})"
        )
    return FlashInferAttention(problem, limits, device)
