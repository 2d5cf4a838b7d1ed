"""The attention backend `blackwell`: prefill with the Triton kernel of `prefill_kernel`."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenspeed_core.api import AttentionLimits, AttentionProblem, AttentionStep
from tokenspeed_kernels_blackwell.attention.prefill_kernel import attend

BLOCK_M = 128  # rows of a tile, as in one tcgen05 instruction
NUM_WARPS = 8  # with 4, the scores of a tile do not fit into registers
# Pipeline stages by head size, within the 227 KiB of shared memory.
NUM_STAGES = {64: 3, 128: 3, 256: 2}
LOG2_E = 1.4426950408889634


class BlackwellAttention:
    """Attention for any mix of rows, intended for prefill: keys are never split over programs.

    `prepare` does host arithmetic only, so CUDA graphs may replay `forward`.
    """

    prepares_on_host = True

    def __init__(self, problem: AttentionProblem) -> None:
        self._problem = problem
        self._num_groups = problem.num_heads // problem.num_kv_heads
        self._step: AttentionStep | None = None

    def prepare(self, step: AttentionStep) -> None:
        """Keep the step for `forward`, which reads its tensors on the device."""
        self._step = step

    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        """Attend. q, out [T, H, D]; caches [B, block_size, K, D], strided on B."""
        problem, step = self._problem, self._step
        assert step is not None, "forward before prepare"
        num_tiles = step.num_tokens // (BLOCK_M // self._num_groups) + step.num_rows
        attend[(num_tiles, problem.num_kv_heads)](
            q,
            _by_head(k_cache),
            _by_head(v_cache),
            out,
            step.query_start,
            step.seq_lens,
            step.block_table,
            step.num_rows,
            problem.window or 0,
            problem.scale * LOG2_E,
            q.stride(0),
            q.stride(1),
            out.stride(0),
            out.stride(1),
            step.block_table.stride(0),
            G=self._num_groups,
            D=problem.head_size,
            BLOCK_SIZE=problem.block_size,
            BLOCK_M=BLOCK_M,
            HAS_WINDOW=problem.window is not None,
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES[problem.head_size],
        )


def attention(
    problem: AttentionProblem, limits: AttentionLimits, device: torch.device
) -> BlackwellAttention:
    """Build the backend (an AttentionFactory). Raises ValueError for unsupported numbers of heads."""
    if (
        problem.num_heads % problem.num_kv_heads
        or problem.num_heads // problem.num_kv_heads > BLOCK_M
    ):
        raise ValueError(
            f"num_heads ({problem.num_heads}) must be a multiple of num_kv_heads ({problem.num_kv_heads}), "
            f"at most {BLOCK_M} times as many"
        )
    return BlackwellAttention(problem)


def _by_head(cache: Tensor) -> TensorDescriptor:
    """Return a TMA descriptor of a cache [B, block_size, K, D]; one box is a KV head of a block."""
    box = [1, 1, cache.shape[1], cache.shape[3]]
    heads = cache.transpose(1, 2)
    return TensorDescriptor(heads, list(heads.shape), list(heads.stride()), box)
