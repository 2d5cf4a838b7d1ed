"""Experts for few tokens: two launches without sorting, each bound by reading the chosen experts' weights once.

A program loads whole weight rows into registers and multiplies them on the CUDA cores, as in `linear.gemv_kernel`. The
pairs of a token and an expert are independent, so that an expert that serves two tokens is read twice, the second time
mostly from the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.linear.gemv import PER_THREAD, one_row_tiling
from tokenspeed_kernels.triton.pdl import supports_pdl

MAX_PAIRS_PER_EXPERT = 0.25  # with more tokens, too many of them share experts
MAX_SIZE = 16384  # features of a weight row that fit into a program's registers
# Weight elements per program of the down projection, unless a single row of each expert has more.
DOWN_ELEMENTS = 16384
MAX_DOWN_ELEMENTS = 32768


@precompile.jit
def _gate_up(
    x_ptr,
    w_ptr,
    ids_ptr,
    hidden_ptr,
    x_stride,
    w_stride_e,
    w_stride_n,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """hidden [pairs, N] = silu(gate @ x) * (up @ x) for pairs with an expert. Grid (tiles of N, pairs).

    PDL: the next kernel may read ids before its own wait, because it starts after this one's.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(1)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    if expert < E:
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        feature = tl.arange(0, BLOCK_K)
        within = feature < K
        mask = (column < N)[:, None] & within[None, :]
        expert_ptr = w_ptr + expert * w_stride_e
        at = column[:, None].to(tl.int64) * w_stride_n + feature[None, :]
        gate_w = tl.load(expert_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")
        at += tl.cast(N, tl.int64) * w_stride_n
        up_w = tl.load(expert_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")
        token = (pair // TOP_K).to(tl.int64)
        x = tl.load(x_ptr + token * x_stride + feature, mask=within, other=0.0).to(tl.float32)
        gate = tl.sum(gate_w.to(tl.float32) * x[None, :], axis=1)
        up = tl.sum(up_w.to(tl.float32) * x[None, :], axis=1)
        hidden = gate / (1.0 + tl.exp(-gate)) * up
        hidden_ptrs = hidden_ptr + pair * N + column
        tl.store(hidden_ptrs, hidden.to(hidden_ptr.dtype.element_ty), mask=column < N)


@precompile.jit
def _down(
    hidden_ptr,
    w_ptr,
    ids_ptr,
    weights_ptr,
    y_ptr,
    w_stride_e,
    w_stride_n,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_J: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """y [T, N] = the sum over a token's experts of weight * down @ hidden. Grid (tiles of N, T).

    The tile of weights is [experts, rows, features]. Products are rounded as in the kernels for many tokens.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(1)
    rank, feature = tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_K)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = token * TOP_K + rank
    within, inside = feature < K, column < N
    expert = tl.load(ids_ptr + pair, mask=rank < TOP_K, other=E).to(tl.int64)
    used = expert < E
    weight = tl.load(weights_ptr + pair, mask=used, other=0.0)
    row = expert[:, None] * w_stride_e + column[None, :].to(tl.int64) * w_stride_n
    w = tl.load(
        w_ptr + row[:, :, None] + feature[None, None, :],
        mask=(used[:, None] & inside[None, :])[:, :, None] & within[None, None, :],
        other=0.0,
        eviction_policy="evict_first",
    )
    if PDL:
        tl.extra.cuda.gdc_wait()
    hidden = tl.load(
        hidden_ptr + pair[:, None] * K + feature[None, :],
        mask=used[:, None] & within[None, :],
        other=0.0,
    )
    product = tl.sum(w.to(tl.float32) * hidden.to(tl.float32)[:, None, :], axis=2)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    scaled = (product * weight[:, None]).to(dtype).to(tl.float32)
    y = tl.sum(scaled, axis=0)
    tl.store(y_ptr + token.to(tl.int64) * N + column, y.to(dtype), mask=inside)


class FewTokens:
    """The experts of one problem, for up to `max_pairs` pairs of a token and an expert."""

    def __init__(self, problem: Problem) -> None:
        top_k = problem["top_k"]
        size, inner = problem["hidden_size"], problem["intermediate_size"]
        block_j, block_inner = triton.next_power_of_2(top_k), triton.next_power_of_2(inner)
        block_n = max(1, min(4, DOWN_ELEMENTS // (block_j * block_inner)))
        num_elements = block_j * block_n * block_inner
        fits = size <= MAX_SIZE and num_elements <= MAX_DOWN_ELEMENTS
        self.max_pairs = max(top_k, int(MAX_PAIRS_PER_EXPERT * problem["num_experts"]))
        self.max_pairs = self.max_pairs if fits else 0
        self._size, self._inner = size, inner
        tiling, pdl = one_row_tiling(size, gated=True), supports_pdl()
        self._up_tiles, self._down_tiles = (
            triton.cdiv(inner, tiling.block_n),
            triton.cdiv(size, block_n),
        )
        self._gate_up = {
            "E": problem["num_experts"],
            "TOP_K": top_k,
            "N": inner,
            "K": size,
            "BLOCK_N": tiling.block_n,
            "BLOCK_K": triton.next_power_of_2(size),
            "PDL": pdl,
            "num_warps": tiling.num_warps,
            "launch_pdl": pdl,
        }
        self._down = {
            "E": problem["num_experts"],
            "TOP_K": top_k,
            "BLOCK_J": block_j,
            "N": size,
            "K": inner,
            "BLOCK_N": block_n,
            "BLOCK_K": block_inner,
            "PDL": pdl,
            "num_warps": min(8, max(1, num_elements // (32 * PER_THREAD))),
            "launch_pdl": pdl,
        }

    def __call__(
        self, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor
    ) -> Tensor:
        """Return y [T, N]; shapes as in the contract of `moe_experts`."""
        num_tokens, num_pairs = x.shape[0], ids.numel()
        hidden = torch.empty((num_pairs, self._inner), dtype=x.dtype, device=x.device)
        _gate_up[(self._up_tiles, num_pairs)](
            x,
            gate_up,
            ids,
            hidden,
            x.stride(0),
            gate_up.stride(0),
            gate_up.stride(1),
            **self._gate_up,
        )
        y = torch.empty((num_tokens, self._size), dtype=x.dtype, device=x.device)
        _down[(self._down_tiles, num_tokens)](
            hidden, down, ids, weights, y, down.stride(0), down.stride(1), **self._down
        )
        return y
