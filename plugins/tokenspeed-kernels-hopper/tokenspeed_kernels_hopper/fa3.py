"""Paged attention with FlashAttention-3 (Shah et al., 2024, arXiv:2407.08608), through its library's torch op."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tokenspeed_core.api import AttentionLimits, AttentionProblem, AttentionStep

if TYPE_CHECKING:
    from tokenspeed_kernels_hopper.gather import Gathered

LIBRARY = "flash_attn_interface"  # importing it registers the op
MAX_GATHERED = 65536  # most tokens of a step that are gathered
MIN_QUERIES = 1024  # queries per key, on average, from which gathering the keys saves time
# Tokens of a step from which keys are gathered. A single prompt of this size has enough queries per key, so the
# warm-up compiles the kernels for it.
MIN_TOKENS = 2 * MIN_QUERIES


class Fa3Attention:
    """Attention for any mix of rows.

    `prepare` of a captured step only keeps the step, so CUDA graphs may replay `forward`. The library's scheduling
    kernel reads the lengths on the device; host-side bounds limit the number of splits. If the host knows that each
    key meets many queries (long prompts), keys and values are first gathered from their blocks.
    """

    prepares_on_host = True
    takes_drafts = True

    def __init__(
        self, problem: AttentionProblem, limits: AttentionLimits, device: torch.device
    ) -> None:
        self._attend = torch.ops.flash_attn_3.fwd.default
        self._scale = problem.scale
        window = problem.window or 0  # the window of a query counts the query itself; 0 is none
        self._chunk, self._window_left = (window, -1) if problem.is_chunked else (0, window - 1)
        self._step: AttentionStep | None = None
        self._memory = _memory(problem, limits, device)
        self._gathered: Gathered | None = None

    def prepare(self, step: AttentionStep) -> None:
        """Keep the step for `forward`, and compute the positions of gathered keys if gathering saves time."""
        self._step = step
        self._gathered = None
        if self._memory is not None and gathering_pays(step) and self._memory.has_room(step):
            self._gathered = self._memory
            self._gathered.place(step)

    def forward(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out: Tensor,
        sinks: Tensor | None = None,
    ) -> None:
        """Attend. q, out [T, H, D]; caches [B, block_size, K, D], strided on B; sinks float32 [H]."""
        step, gathered = self._step, self._gathered
        assert step is not None, "forward before prepare"
        where: dict[str, Any]
        if gathered is not None:
            gathered.fill(step, k_cache, v_cache)
            keys, values = gathered.keys, gathered.values
            where = {"cu_seqlens_k": gathered.starts, "max_seqlen_k": step.max_seq_len}
        else:
            keys, values, where = k_cache, v_cache, {"page_table": step.block_table}
        self._attend(
            q,
            keys,
            values,
            out=out,
            cu_seqlens_q=step.query_start,
            seqused_k=step.seq_lens,
            max_seqlen_q=step.max_num_query,
            softmax_scale=self._scale,
            is_causal=True,
            window_size_left=self._window_left,
            window_size_right=0,
            attention_chunk=self._chunk,
            num_splits=0,
            sinks=None if sinks is None else sinks.to(torch.bfloat16),
            **where,
        )


def _memory(
    problem: AttentionProblem, limits: AttentionLimits, device: torch.device
) -> Gathered | None:
    """Allocate the gather buffers, or return None if gathering cannot save time for this problem."""
    is_long = (
        problem.phase == "prefill"
        and problem.window is None
        and limits.max_num_tokens >= MIN_TOKENS
    )
    if device.type != "cuda" or not is_long:
        return None
    from tokenspeed_kernels_hopper.gather import PADDING, Gathered

    return Gathered(
        max(limits.max_num_tokens, min(limits.max_model_len, MAX_GATHERED)) + 8 * PADDING,
        limits.max_num_rows,
        problem.num_kv_heads,
        problem.head_size,
        getattr(torch, problem.kv_dtype),
        device,
    )


def gathering_pays(step: AttentionStep) -> bool:
    """Return whether gathering a step's keys is known to take less time than it saves."""
    if step.host_query_start is None or step.host_seq_lens is None or step.num_tokens < MIN_TOKENS:
        return False
    counts = [last - first for first, last in pairwise(step.host_query_start)]
    pairs = sum(
        count * (length - count // 2)
        for count, length in zip(counts, step.host_seq_lens, strict=True)
    )
    return pairs >= MIN_QUERIES * sum(step.host_seq_lens)


def attention(
    problem: AttentionProblem, limits: AttentionLimits, device: torch.device
) -> Fa3Attention:
    """Build the backend (an AttentionFactory). Raises ImportError if the library cannot be loaded."""
    if problem.num_heads % problem.num_kv_heads:
        raise ValueError(
            f"num_heads ({problem.num_heads}) is not a multiple of num_kv_heads ({problem.num_kv_heads})"
        )
    return Fa3Attention(problem, limits, device)
