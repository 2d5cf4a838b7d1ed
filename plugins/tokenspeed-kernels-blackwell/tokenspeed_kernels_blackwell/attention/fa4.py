"""Paged attention with FlashAttention-4, which is written in CuTe DSL and compiles its kernels at run time."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from tokenspeed_core.api import AttentionLimits, AttentionProblem, AttentionStep

LIBRARY = "flash_attn.cute.interface"


class Fa4Attention:
    """Attention for any mix of rows.

    `prepare` only keeps the step, so CUDA graphs may replay `forward`: the library reads lengths on the device, and
    uses the host-side bounds only to choose a kernel.
    """

    prepares_on_host = True

    def __init__(self, problem: AttentionProblem) -> None:
        # Private, because the public functions do not accept an output tensor.
        self._attend = import_module(LIBRARY)._flash_attn_fwd
        self._scale = problem.scale
        self._window_left = None if problem.window is None else problem.window - 1
        self._soft_cap = problem.soft_cap
        self._step: AttentionStep | None = None

    def prepare(self, step: AttentionStep) -> None:
        """Keep the step for `forward`, which reads its tensors on the device."""
        self._step = step

    def forward(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out: Tensor,
        sinks: Tensor | None = None,
    ) -> None:
        """Attend. q, out [T, H, D]; caches [B, block_size, K, D], strided on B; sinks float32 [H]."""
        step = self._step
        assert step is not None, "forward before prepare"
        self._attend(
            q,
            k_cache,
            v_cache,
            out=out,
            cu_seqlens_q=step.query_start,
            seqused_k=step.seq_lens,
            max_seqlen_q=step.max_num_query,
            max_seqlen_k=step.max_seq_len,
            page_table=step.block_table,
            softmax_scale=self._scale,
            causal=True,
            softcap=self._soft_cap,
            window_size_left=self._window_left,
            window_size_right=0,
            learnable_sink=sinks,
            num_splits=1,
        )


def attention(
    problem: AttentionProblem, limits: AttentionLimits, device: torch.device
) -> Fa4Attention:
    """Build the backend (an AttentionFactory). Raises ImportError if the library cannot be loaded."""
    if problem.num_heads % problem.num_kv_heads:
        raise ValueError(
            f"num_heads ({problem.num_heads}) is not a multiple of num_kv_heads ({problem.num_kv_heads})"
        )
    return Fa4Attention(problem)
