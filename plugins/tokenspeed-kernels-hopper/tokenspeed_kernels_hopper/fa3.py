"""Paged attention by FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608), through its library's own op."""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tokenspeed_core.api import AttentionLimits, AttentionProblem, AttentionStep

if TYPE_CHECKING:
    from tokenspeed_kernels_hopper.gather import Gathered

LIBRARY = "flash_attn_interface"  # whatever distribution brought it; importing it registers the op
MAX_GATHERED = 65536  # tokens of a step's rows
MIN_QUERIES = 1024  # that must meet a key, on average, for a copy of all keys to take less time than it spares
MIN_TOKENS = (
    2 * MIN_QUERIES
)  # of a step: one prompt of so many pays, so that a start compiles what requests use


class Fa3Attention:
    """Attention for any mix of rows. `prepare` of a captured step only keeps it, so graphs may replay it.

    Rows' lengths are read on the device by a scheduling kernel of the library's own; how many parts the keys of a row
    may be cut into follows from host-side bounds, and how many it is cut into from its length. Where the host knows
    that keys meet many queries, long prompts, they are gathered from their blocks first.
    """

    prepares_on_host = True

    def __init__(
        self, problem: AttentionProblem, limits: AttentionLimits, device: torch.device
    ) -> None:
        import_module(LIBRARY)
        self._attend = torch.ops.flash_attn_3.fwd.default
        self._scale = problem.scale
        self._window_left = -1 if problem.window is None else problem.window - 1
        self._step: AttentionStep | None = None
        self._memory = _memory(problem, limits, device)
        self._gathered: Gathered | None = None

    def prepare(self, step: AttentionStep) -> None:
        """Keep the step, whose tensors `forward` reads on the device; find where gathered keys go if they are to be."""
        self._step = step
        self._gathered = (
            self._memory
            if self._memory is not None and pays(step) and self._memory.holds(step)
            else None
        )
        if self._gathered is not None:
            self._gathered.place(step)

    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        """Attend. q, out [T, H, D]; caches [B, block_size, K, D], strided on B."""
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
            num_splits=0,
            **where,
        )


def _memory(
    problem: AttentionProblem, limits: AttentionLimits, device: torch.device
) -> Gathered | None:
    """Allocate for keys of prompts without a window, on a device, where steps can have as many tokens as pay."""
    is_long = (
        problem.phase == "prefill"
        and problem.window is None
        and limits.max_num_tokens >= MIN_TOKENS
    )
    if device.type != "cuda" or not is_long:
        return None
    from tokenspeed_kernels_hopper.gather import ROOM, Gathered

    return Gathered(
        max(limits.max_num_tokens, min(limits.max_model_len, MAX_GATHERED)) + 8 * ROOM,
        limits.max_num_rows,
        problem.num_kv_heads,
        problem.head_size,
        getattr(torch, problem.kv_dtype),
        device,
    )


def pays(step: AttentionStep) -> bool:
    """Say whether copying a step's keys first is known to take less time than it spares."""
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
    """Build the backend (an AttentionFactory). Raises ImportError where the library cannot be loaded."""
    if problem.num_heads % problem.num_kv_heads:
        raise ValueError(f"{problem.num_heads} query heads over {problem.num_kv_heads} key heads")
    return Fa3Attention(problem, limits, device)
