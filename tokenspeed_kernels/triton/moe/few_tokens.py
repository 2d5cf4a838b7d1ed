"""Experts for few tokens: two GEMVs without sorting, each bound by reading the chosen experts' weights once.

A program loads whole weight rows into registers and multiplies them on the CUDA cores, as in `linear.gemv_kernel`. The
pairs of a token and an expert are independent. If two tokens choose an expert, its weights are therefore read twice, the
second time mostly from the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.linear import gemv, gemv_fp8
from tokenspeed_kernels.triton.linear.gemv import Tiling
from tokenspeed_kernels.triton.moe.scales import Scales
from tokenspeed_kernels.triton.pdl import supports_pdl
from tokenspeed_kernels.triton.quantize.fp8_per_group import GROUP

MAX_WARPS = 8  # of the down projection
# The largest hidden size, and the most pairs per expert, for which these kernels are faster than sorting. 16-bit and 8-bit
# weights were slower for DeepSeek-V3's hidden size of 7,168. Sizes in between were not measured. 4-bit weights were
# measured up to gpt-oss's hidden size of 2,880.
LIMITS = {"none": (4096, 0.25), "int4": (2880, 0.125), "mxfp4": (2880, 0.25)}
LIMITS_8_BITS = (2048, 0.125)


@triton.jit
def _add_features(product, scale, GROUP: tl.constexpr):
    """Return the sums of a product over its features, the last axis.

    Unless `scale` is None, the sum of each GROUP features is multiplied by its value there.
    """
    last: tl.constexpr = len(product.shape) - 1
    if scale is None:
        total = tl.sum(product, axis=last)
    else:
        num_groups: tl.constexpr = product.shape[last] // GROUP
        if last == 1:
            groups = tl.reshape(product, [product.shape[0], num_groups, GROUP])
        else:
            shape: tl.constexpr = [product.shape[0], product.shape[1], num_groups, GROUP]
            groups = tl.reshape(product, shape)
        total = tl.sum(tl.sum(groups, axis=last + 1) * scale, axis=last)
    return total


@precompile.jit
def _gate_up(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
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
    SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """hidden [pairs, N] = silu(gate @ x) * (up @ x) for pairs with an expert. Grid (tiles of N, pairs).

    SCALES are those of `gemm_kernel`, in groups of GROUP features.
    PDL: the next kernels may read ids before their own wait, because they start after this one's.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(1)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    if expert < E:
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        feature = tl.arange(0, BLOCK_K)
        inside, within = column < N, feature < K
        mask = inside[:, None] & within[None, :]
        expert_ptr = w_ptr + expert * w_stride_e
        at = column[:, None].to(tl.int64) * w_stride_n + feature[None, :]
        gate_w = tl.load(expert_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")
        at += tl.cast(N, tl.int64) * w_stride_n
        up_w = tl.load(expert_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")
        token = (pair // TOP_K).to(tl.int64)
        gate_scale, up_scale = None, None
        if SCALES == "block":
            num_groups: tl.constexpr = (K + GROUP - 1) // GROUP
            group = tl.arange(0, BLOCK_K // GROUP)
            x_scale_ptrs = x_scale_ptr + token * num_groups + group
            x_scale = tl.load(x_scale_ptrs, mask=group < num_groups, other=0.0)[None, :]
            block_row = expert * (2 * N // GROUP) + tl.program_id(0) * BLOCK_N // GROUP
            scale_ptrs = w_scale_ptr + block_row * num_groups + group[None, :]
            held = (group < num_groups)[None, :]
            gate_scale = tl.load(scale_ptrs, mask=held, other=0.0) * x_scale
            scale_ptrs += N // GROUP * num_groups
            up_scale = tl.load(scale_ptrs, mask=held, other=0.0) * x_scale
        x = tl.load(x_ptr + token * x_stride + feature, mask=within, other=0.0).to(tl.float32)
        gate = _add_features(gate_w.to(tl.float32) * x[None, :], gate_scale, GROUP)
        up = _add_features(up_w.to(tl.float32) * x[None, :], up_scale, GROUP)
        if SCALES == "channel":
            x_scale = tl.load(x_scale_ptr + token)
            scale_ptrs = w_scale_ptr + expert * (2 * N) + column
            gate *= tl.load(scale_ptrs, mask=inside, other=0.0) * x_scale
            up *= tl.load(scale_ptrs + N, mask=inside, other=0.0) * x_scale
        hidden = gate / (1.0 + tl.exp(-gate)) * up
        hidden_ptrs = hidden_ptr + pair * N + column
        tl.store(hidden_ptrs, hidden.to(hidden_ptr.dtype.element_ty), mask=inside)


@precompile.jit
def _down(
    hidden_ptr,
    hidden_scale_ptr,
    w_ptr,
    w_scale_ptr,
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
    SCALES: tl.constexpr,
    GROUP: tl.constexpr,
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
    scale = None
    if SCALES == "channel":
        row_scale_ptrs = w_scale_ptr + expert[:, None] * N + column[None, :]
        row_scale = tl.load(row_scale_ptrs, mask=used[:, None] & inside[None, :], other=0.0)
    elif SCALES == "block":
        num_groups: tl.constexpr = (K + GROUP - 1) // GROUP
        group = tl.arange(0, BLOCK_K // GROUP)
        held = used[:, None] & (group < num_groups)[None, :]
        block_row = expert * ((N + GROUP - 1) // GROUP) + tl.program_id(0) * BLOCK_N // GROUP
        scale_ptrs = w_scale_ptr + block_row[:, None] * num_groups + group[None, :]
        scale = tl.load(scale_ptrs, mask=held, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    hidden = tl.load(
        hidden_ptr + pair[:, None] * K + feature[None, :],
        mask=used[:, None] & within[None, :],
        other=0.0,
    )
    if SCALES == "block":
        hidden_scale_ptrs = hidden_scale_ptr + pair[:, None] * num_groups + group[None, :]
        scale = (scale * tl.load(hidden_scale_ptrs, mask=held, other=0.0))[:, None, :]
    product = w.to(tl.float32) * hidden.to(tl.float32)[:, None, :]
    product = _add_features(product, scale, GROUP)
    if SCALES == "channel":
        product *= row_scale * tl.load(hidden_scale_ptr + pair, mask=used, other=0.0)[:, None]
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    scaled = (product * weight[:, None]).to(dtype).to(tl.float32)
    y = tl.sum(scaled, axis=0)
    tl.store(y_ptr + token.to(tl.int64) * N + column, y.to(dtype), mask=inside)


def few_tilings(problem: Problem, kind: str) -> tuple[Tiling, Tiling]:
    """Return the tilings of both GEMVs: weight rows per program, of gate and of up, or of each expert of a token.

    `kind` is that of the scales (see `FewTokens`), or "int4" or "mxfp4" for 4-bit weights.
    """
    row_tiling = gemv.one_row_tiling if kind == "none" else gemv_fp8.row_tiling
    elements = _down_elements(problem)
    block_n = max(1, min(4, _max_elements(kind) // elements))
    num_warps = min(MAX_WARPS, max(1, MAX_WARPS * elements * block_n // _max_elements(kind)))
    return row_tiling(problem["hidden_size"], gated=True), Tiling(block_n, num_warps)


def _down_elements(problem: Problem) -> int:
    """Return the elements of a weight row of all experts of a token, padded."""
    top_k, inner = problem["top_k"], problem["intermediate_size"]
    return triton.next_power_of_2(top_k) * triton.next_power_of_2(inner)


def _max_elements(kind: str) -> int:
    """Return the elements of a down projection that MAX_WARPS load at once."""
    per_thread = gemv.PER_THREAD if kind == "none" else gemv_fp8.PER_THREAD
    return MAX_WARPS * 32 * per_thread


def max_pairs(problem: Problem, kind: str) -> int:
    """Return the most pairs of a token and an expert for these kernels, at least those of a token; 0 for large weights."""
    longest, pairs_per_expert = LIMITS.get(kind, LIMITS_8_BITS)
    _, down = few_tilings(problem, kind)
    num_elements = _down_elements(problem) * down.block_n
    if problem["hidden_size"] > longest or num_elements > 2 * _max_elements(kind):
        return 0
    return max(problem["top_k"], int(pairs_per_expert * problem["num_experts"]))


class FewTokens:
    """The experts of one problem, for up to `max_pairs` pairs of a token and an expert.

    `kind` is that of the scales, "none" without them. Shapes are those of the contract of the op.
    """

    def __init__(self, problem: Problem, kind: str = "none") -> None:
        top_k = problem["top_k"]
        size, inner = problem["hidden_size"], problem["intermediate_size"]
        up, down = few_tilings(problem, kind)
        self.max_pairs = max_pairs(problem, kind)
        self._size, self._inner = size, inner
        self._up_tiles = triton.cdiv(inner, up.block_n)
        self._down_tiles = triton.cdiv(size, down.block_n)
        pdl, smallest = supports_pdl(), GROUP if kind == "block" else 1
        common = {
            "E": problem["num_experts"],
            "TOP_K": top_k,
            "SCALES": kind,
            "GROUP": GROUP,
            "PDL": pdl,
            "launch_pdl": pdl,
        }
        self._gate_up = {
            **common,
            "N": inner,
            "K": size,
            "BLOCK_N": up.block_n,
            "BLOCK_K": max(smallest, triton.next_power_of_2(size)),
            "num_warps": up.num_warps,
        }
        self._down = {
            **common,
            "BLOCK_J": triton.next_power_of_2(top_k),
            "N": size,
            "K": inner,
            "BLOCK_N": down.block_n,
            "BLOCK_K": max(smallest, triton.next_power_of_2(inner)),
            "num_warps": down.num_warps,
        }

    def run_gate_up(
        self, x: Tensor, gate_up: Tensor, ids: Tensor, scales: Scales | None = None
    ) -> Tensor:
        """Return silu(x @ gate) * (x @ up) of all pairs [T * k, I]; rows without an expert are not written."""
        hidden = torch.empty(
            (ids.numel(), self._inner),
            dtype=x.dtype if scales is None else scales.dtype,
            device=x.device,
        )
        _gate_up[(self._up_tiles, ids.numel())](
            x,
            None if scales is None else scales.inputs,
            gate_up,
            None if scales is None else scales.weight,
            ids,
            hidden,
            x.stride(0),
            gate_up.stride(0),
            gate_up.stride(1),
            **self._gate_up,
        )
        return hidden

    def run_down(
        self,
        hidden: Tensor,
        down: Tensor,
        weights: Tensor,
        ids: Tensor,
        scales: Scales | None = None,
    ) -> Tensor:
        """Return y [T, N], the sums of weight * hidden @ down."""
        y = torch.empty(
            (len(ids), self._size),
            dtype=hidden.dtype if scales is None else scales.dtype,
            device=hidden.device,
        )
        _down[(self._down_tiles, len(ids))](
            hidden,
            None if scales is None else scales.inputs,
            down,
            None if scales is None else scales.weight,
            ids,
            weights,
            y,
            down.stride(0),
            down.stride(1),
            **self._down,
        )
        return y
