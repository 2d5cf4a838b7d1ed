"""Experts with biases and a clamped SwiGLU: grouped GEMMs over tokens sorted by expert.

Weights are unquantized or MXFP4. The kernels read MXFP4 weights once per tile of pairs and dequantize them in registers.
Dequantization is exact, so the result equals that of unquantized weights with the same values. For few tokens, MXFP4
experts do not sort the pairs (see `few_tokens_w4`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.reference.biased_experts import GROUP, Experts, ExpertsMxfp4
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.moe.experts import add_up, blank_routings, sort_by_expert
from tokenspeed_kernels.triton.moe.few_tokens_w4 import FewTokensW4, PackedWeight
from tokenspeed_kernels.triton.moe.kernel import find_tile
from tokenspeed_kernels.triton.moe.tuned import tuned_tilings

_GROUP = tl.constexpr(GROUP)
_E2M1_BIAS = tl.constexpr(2.0**126)  # from float32's exponent bias, 127, to that of E2M1, 1


@dataclass(frozen=True, slots=True)
class Tiling:
    """Pairs and output columns per tile of the two GEMMs, features per iteration, warps, pipeline stages."""

    block_m: int
    up_columns: int
    down_columns: int
    block_k: int
    num_warps: int
    num_stages: int


# (largest average of pairs per expert, tiling)
Tilings = tuple[tuple[float, Tiling], ...]


def moe_biased_experts(problem: Problem) -> Experts:
    """Return `experts(x, gate_up, gate_up_bias, down, down_bias, weights, ids) -> y [T, N]`; CUDA graphs may replay it."""
    tilings = tuned_tilings("moe_biased_experts", Tiling)
    launch = _launcher(problem, tilings)

    def experts(
        x: Tensor,
        gate_up: Tensor,
        gate_up_bias: Tensor,
        down: Tensor,
        down_bias: Tensor,
        weights: Tensor,
        ids: Tensor,
    ) -> Tensor:
        return launch(x, gate_up, None, gate_up_bias, down, None, down_bias, weights, ids)

    blank = partial(precompile.blank, problem["dtype"])
    _precompile(problem, tilings, experts, lambda *shape: (blank(*shape),))
    return experts


def moe_biased_experts_mxfp4(problem: Problem) -> ExpertsMxfp4:
    """Return `experts(x, gate_up, gate_up_scale, gate_up_bias, down, down_scale, down_bias, weights, ids) -> y [T, N]`.

    CUDA graphs may replay it.
    """
    tilings = tuned_tilings("moe_biased_experts_mxfp4", Tiling)
    launch, few_tokens = _launcher(problem, tilings), FewTokensW4(problem, "mxfp4")

    def experts(
        x: Tensor,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        gate_up_bias: Tensor,
        down: Tensor,
        down_scale: Tensor,
        down_bias: Tensor,
        weights: Tensor,
        ids: Tensor,
    ) -> Tensor:
        if 0 < ids.numel() <= few_tokens.max_pairs:
            up_weight = PackedWeight(gate_up, gate_up_scale, bias=gate_up_bias)
            down_weight = PackedWeight(down, down_scale, bias=down_bias)
            return few_tokens(x, up_weight, down_weight, weights, ids)
        return launch(
            *(x, gate_up, gate_up_scale, gate_up_bias, down, down_scale, down_bias, weights, ids)
        )

    def blank(experts: int, rows: int, size: int) -> tuple[Tensor, Tensor]:
        return (
            precompile.blank("uint8", experts, rows, size // 2),
            precompile.blank("uint8", experts, rows, size // GROUP),
        )

    _precompile(problem, tilings, experts, blank, few_tokens.max_pairs // problem["top_k"] + 1)
    return experts


def _precompile(
    problem: Problem,
    tilings: Tilings,
    experts: Callable[..., Tensor],
    weight: Callable[[int, int, int], tuple[Tensor, ...]],
    *more: int,
) -> None:
    """Compile the kernels for every tiling. `weight` makes the tensors of a blank weight.

    `more` are other numbers of tokens.
    """
    num_experts, size = problem["num_experts"], problem["hidden_size"]
    inner, blank = problem["intermediate_size"], partial(precompile.blank, problem["dtype"])
    operands = (
        *weight(num_experts, 2 * inner, size),
        blank(num_experts, 2 * inner),
        *weight(num_experts, size, inner),
        blank(num_experts, size),
    )
    bounds = [bound for bound, _ in tilings[:-1]]
    for num_tokens, *routing in blank_routings(problem, bounds, *more):
        precompile.compile_for(experts, blank(num_tokens, size), *operands, *routing)


def _launcher(problem: Problem, tilings: Tilings) -> Callable[..., Tensor]:
    """Return a function that runs the experts; scales are None for unquantized weights."""
    num_experts, top_k = problem["num_experts"], problem["top_k"]
    size, inner = problem["hidden_size"], problem["intermediate_size"]
    precision = "ieee" if problem["dtype"] == "float32" else "tf32"

    def launch(
        x: Tensor,
        gate_up: Tensor,
        gate_up_scale: Tensor | None,
        gate_up_bias: Tensor,
        down: Tensor,
        down_scale: Tensor | None,
        down_bias: Tensor,
        weights: Tensor,
        ids: Tensor,
    ) -> Tensor:
        num_pairs = ids.numel()
        if num_pairs == 0:
            return torch.empty((x.shape[0], size), dtype=x.dtype, device=x.device)
        pairs, counts = sort_by_expert(ids, num_experts)
        average = num_pairs / num_experts
        tiling = next(tiling for bound, tiling in tilings if average <= bound)
        num_tiles = num_pairs // tiling.block_m + min(num_experts, num_pairs)
        tile = {
            "E": num_experts,
            "BLOCK_E": triton.next_power_of_2(num_experts),
            "BLOCK_M": tiling.block_m,
            "BLOCK_K": min(tiling.block_k, 64) if precision == "ieee" else tiling.block_k,
            "PRECISION": precision,
            "num_warps": tiling.num_warps,
            "num_stages": tiling.num_stages,
        }
        hidden = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
        _gate_up[(triton.cdiv(inner, tiling.up_columns), num_tiles)](
            x,
            gate_up,
            gate_up_scale,
            gate_up_bias,
            hidden,
            pairs,
            counts,
            x.stride(0),
            ALPHA=problem["alpha"],
            LIMIT=problem["limit"],
            TOP_K=top_k,
            N=inner,
            K=size,
            BLOCK_N=tiling.up_columns,
            **tile,
        )
        scaled = torch.empty((num_pairs, size), dtype=x.dtype, device=x.device)
        _down[(triton.cdiv(size, tiling.down_columns), num_tiles)](
            hidden,
            down,
            down_scale,
            down_bias,
            scaled,
            pairs,
            counts,
            weights,
            N=size,
            K=inner,
            BLOCK_N=tiling.down_columns,
            **tile,
        )
        return add_up(scaled, ids, num_experts)

    return launch


@triton.jit
def _e2m1(code):
    """Return the values, float32, of E2M1 codes from 0 to 15."""
    # The exponent and mantissa are moved to their places in a float32. This is correct for subnormal numbers too: code 1 is 0.5.
    code = code.to(tl.uint32)
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * _E2M1_BIAS


@triton.jit
def _multiply(
    acc,
    x,
    w_ptr,
    scale_ptr,
    row,
    start,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return acc + x @ w[row, start : start + BLOCK_K].T, for x [M, BLOCK_K] and int64 rows [N] of w [.., K]."""
    if scale_ptr is None:
        k = start + tl.arange(0, BLOCK_K)
        w = tl.load(w_ptr + row[None, :] * K + k[:, None], mask=(k < K)[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
    else:
        NUM_PAIRS: tl.constexpr = BLOCK_K // 2
        NUM_GROUPS: tl.constexpr = BLOCK_K // _GROUP
        N: tl.constexpr = acc.shape[1]
        pair = start // 2 + tl.arange(0, NUM_PAIRS)
        group = start // _GROUP + tl.arange(0, NUM_GROUPS)
        codes = tl.load(
            w_ptr + row[None, :] * (K // 2) + pair[:, None], mask=(pair < K // 2)[:, None], other=0
        )
        exponent = tl.load(
            scale_ptr + row[None, :] * (K // _GROUP) + group[:, None],
            mask=(group < K // _GROUP)[:, None],
            other=0,
        )
        scale = (exponent.to(tl.uint32) << 23).to(tl.float32, bitcast=True)
        scale = tl.broadcast_to(scale[:, None, :], [NUM_GROUPS, _GROUP // 2, N])
        scale = tl.reshape(scale, [NUM_PAIRS, N])
        even, odd = tl.split(tl.reshape(x, [x.shape[0], NUM_PAIRS, 2]))
        low = (_e2m1(codes & 15) * scale).to(x.dtype)
        high = (_e2m1(codes >> 4) * scale).to(x.dtype)
        acc = tl.dot(even, low, acc, input_precision=PRECISION)
        acc = tl.dot(odd, high, acc, input_precision=PRECISION)
    return acc


@precompile.jit
def _gate_up(
    x_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    hidden_ptr,
    pairs_ptr,
    counts_ptr,
    x_stride,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """hidden [pairs, N] = the clamped SwiGLU of x @ gate and x @ up, in sorted order.

    Grid (tiles of N, tiles of pairs).
    """
    expert, first, end = find_tile(counts_ptr, tl.program_id(1), E, BLOCK_E, BLOCK_M)
    if expert < E:
        place = first + tl.arange(0, BLOCK_M)
        used = place < end
        token = (tl.load(pairs_ptr + place, mask=used, other=0) // TOP_K).to(tl.int64)
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        gate_row = expert.to(tl.int64) * (2 * N) + 2 * tl.where(column < N, column, 0)
        k = tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + token[:, None] * x_stride + k[None, :]
        gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for start in tl.range(0, K, BLOCK_K):
            inside = k < K - start
            x = tl.load(x_ptrs + start, mask=used[:, None] & inside[None, :], other=0.0)
            gate = _multiply(gate, x, w_ptr, scale_ptr, gate_row, start, K, BLOCK_K, PRECISION)
            up = _multiply(up, x, w_ptr, scale_ptr, gate_row + 1, start, K, BLOCK_K, PRECISION)
        gate += tl.load(bias_ptr + gate_row).to(tl.float32)[None, :]
        up += tl.load(bias_ptr + gate_row + 1).to(tl.float32)[None, :]
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        activated = (up + 1.0) * (gate / (1.0 + tl.exp(-ALPHA * gate)))
        at = hidden_ptr + place.to(tl.int64)[:, None] * N + column[None, :]
        dtype: tl.constexpr = hidden_ptr.dtype.element_ty
        tl.store(at, activated.to(dtype), mask=used[:, None] & (column < N)[None, :])


@precompile.jit
def _down(
    hidden_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    scaled_ptr,
    pairs_ptr,
    counts_ptr,
    weights_ptr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """scaled [pairs, N] = weight * (hidden @ down + bias), in the order of tokens.

    Grid (tiles of N, tiles of pairs).
    """
    expert, first, end = find_tile(counts_ptr, tl.program_id(1), E, BLOCK_E, BLOCK_M)
    if expert < E:
        place = first + tl.arange(0, BLOCK_M)
        used = place < end
        pair = tl.load(pairs_ptr + place, mask=used, other=0).to(tl.int64)
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        row = expert.to(tl.int64) * N + tl.where(column < N, column, 0)
        k = tl.arange(0, BLOCK_K)
        hidden_ptrs = hidden_ptr + place.to(tl.int64)[:, None] * K + k[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for start in tl.range(0, K, BLOCK_K):
            inside = k < K - start
            hidden = tl.load(hidden_ptrs + start, mask=used[:, None] & inside[None, :], other=0.0)
            acc = _multiply(acc, hidden, w_ptr, scale_ptr, row, start, K, BLOCK_K, PRECISION)
        acc += tl.load(bias_ptr + row).to(tl.float32)[None, :]
        acc = acc * tl.load(weights_ptr + pair, mask=used, other=0.0)[:, None]
        at = scaled_ptr + pair[:, None] * N + column[None, :]
        tl.store(
            at, acc.to(scaled_ptr.dtype.element_ty), mask=used[:, None] & (column < N)[None, :]
        )
