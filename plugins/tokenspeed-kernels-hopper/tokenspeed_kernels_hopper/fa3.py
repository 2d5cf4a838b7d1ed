"""Paged attention by FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608), through its library's own op."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from tokenspeed_core.api import AttentionLimits, AttentionProblem, AttentionStep

LIBRARY = "flash_attn_interface"  # whatever distribution brought it; importing it registers the op


class Fa3Attention:
    """Attention for any mix of rows. `prepare` only keeps the step, so graphs may replay it.

    Rows' lengths are read on the device by a scheduling kernel of the library's own; how many parts the keys of a row
    may be cut into follows from host-side bounds, and how many it is cut into from its length.
    """

    prepares_on_host = True

    def __init__(self, problem: AttentionProblem) -> None:
        import_module(LIBRARY)
        self._attend = torch.ops.flash_attn_3.fwd.default
        self._scale = problem.scale
        self._window_left = -1 if problem.window is None else problem.window - 1
        self._step: AttentionStep | None = None

    def prepare(self, step: AttentionStep) -> None:
        """Keep the step, whose tensors `forward` reads on the device."""
        self._step = step

    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        """Attend. q, out [T, H, D]; caches [B, block_size, K, D], strided on B."""
        step = self._step
        assert step is not None, "forward before prepare"
        self._attend(
            q, k_cache, v_cache, out=out, cu_seqlens_q=step.query_start, seqused_k=step.seq_lens,
            max_seqlen_q=step.max_num_query, page_table=step.block_table, softmax_scale=self._scale,
            is_causal=True, window_size_left=self._window_left, window_size_right=0, num_splits=0,
        )


def attention(problem: AttentionProblem, limits: AttentionLimits, device: torch.device) -> Fa3Attention:
    """Build the backend (an AttentionFactory). Raises ImportError where the library cannot be loaded."""
    if problem.num_heads % problem.num_kv_heads:
        raise ValueError(f"{problem.num_heads} query heads over {problem.num_kv_heads} key heads")
    return Fa3Attention(problem)
