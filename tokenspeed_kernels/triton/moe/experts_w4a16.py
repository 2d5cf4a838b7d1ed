"""Experts with 4-bit weights, integers (W4A16) or E2M1 floats (MXFP4): grouped GEMMs over tokens sorted by expert.

As in `gemm_w4a16`, the weight is the wide side of a tile and is converted in registers. The sum of a group of columns is
scaled before it is added to the result. The kernels read only the weights of chosen experts. Pairs of few tokens are not
sorted (see `few_tokens_w4`).
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
from tokenspeed_kernels.reference.moe_w4a16 import ExpertsMxfp4, ExpertsW4A16
from tokenspeed_kernels.reference.w4a16 import MX_GROUP
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.linear.gemm_w4a16 import (
    BIAS,
    MAX_BLOCK_K,
    MIDDLE,
    RUN,
    e2m1_halves,
    e8m0,
    halves,
)
from tokenspeed_kernels.triton.moe.experts import add_up, blank_routings, sort_by_expert
from tokenspeed_kernels.triton.moe.few_tokens_w4 import FewTokensW4, PackedWeight
from tokenspeed_kernels.triton.moe.kernel import find_tile
from tokenspeed_kernels.triton.moe.tuned import tuned_tilings


@dataclass(frozen=True, slots=True)
class Tiling:
    """Weight rows and pairs per tile, warps, pipeline stages."""

    block_n: int
    block_t: int
    num_warps: int
    num_stages: int


# (largest average of pairs per expert, tiling)
Tilings = tuple[tuple[float, Tiling], ...]
Weight = tuple[Tensor | None, ...]


@triton.jit
def _multiply_tile(
    x_ptrs,
    used,
    w_ptr,
    scale_ptr,
    zero_ptr,
    order_ptr,
    row,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    MIDDLE: tl.constexpr,
    IS_E2M1: tl.constexpr,
    HAS_ASM: tl.constexpr,
):
    """Return the weight's rows [BLOCK_N] times the inputs at `x_ptrs` [1, BLOCK_T], float32 [BLOCK_N, BLOCK_T]."""
    HALF: tl.constexpr = BLOCK_K // 2
    byte = tl.arange(0, HALF)
    feature = byte // RUN * (2 * RUN) + byte % RUN
    w_ptrs = w_ptr + row[:, None] * (K // 2) + byte[None, :]
    group_at = row * (K // GROUP)
    dtype: tl.constexpr = x_ptrs.dtype.element_ty
    total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        packed = tl.load(w_ptrs + start // 2)
        if HAS_ORDER:
            low_at = tl.load(order_ptr + start + feature)
            high_at = tl.load(order_ptr + start + feature + RUN)
        else:
            low_at, high_at = start + feature, start + feature + RUN
        low_x = tl.load(x_ptrs + low_at[:, None], mask=used[None, :], other=0.0)
        high_x = tl.load(x_ptrs + high_at[:, None], mask=used[None, :], other=0.0)
        group = start // GROUP
        scale = tl.load(scale_ptr + group_at + group)
        if IS_E2M1:
            scale = e8m0(scale)
            low, high = e2m1_halves(packed, dtype, HAS_ASM)
        else:
            scale = scale.to(tl.float32)
            if HAS_ZERO:
                offset = tl.load(zero_ptr + group_at + group).to(tl.float32) + BIAS
            else:
                offset = tl.full((BLOCK_N,), BIAS + MIDDLE, tl.float32)
            offsets = tl.broadcast_to(offset.to(dtype)[:, None], (BLOCK_N, HALF))
            low, high = halves(packed, offsets, BIAS, HAS_ASM)
        part = tl.dot(low, low_x)
        part = tl.dot(high, high_x, part)
        total += part * scale[:, None]
    return total


@precompile.jit
def _gate_up(
    x_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    order_ptr,
    hidden_ptr,
    pairs_ptr,
    counts_ptr,
    x_stride,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    MIDDLE: tl.constexpr,
    IS_E2M1: tl.constexpr,
    HAS_ASM: tl.constexpr,
):
    """hidden [pairs, N] = silu(gate @ x) * (up @ x), in sorted order. Grid (tiles of N, tiles of pairs)."""
    expert, first, end = find_tile(counts_ptr, tl.program_id(1), E, BLOCK_E, BLOCK_T)
    if expert < E:
        place = first + tl.arange(0, BLOCK_T)
        used = place < end
        token = (tl.load(pairs_ptr + place, mask=used, other=0) // TOP_K).to(tl.int64)
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        row = expert.to(tl.int64) * (2 * N) + tl.minimum(column, N - 1)
        x_ptrs = x_ptr + token[None, :] * x_stride
        order = order_ptr
        if HAS_ORDER:
            order = order_ptr + expert.to(tl.int64) * K
        gate = _multiply_tile(
            x_ptrs, used, w_ptr, scale_ptr, zero_ptr, order, row, K, GROUP, HAS_ZERO, HAS_ORDER,
            BLOCK_N, BLOCK_T, BLOCK_K, BIAS, MIDDLE, IS_E2M1, HAS_ASM,
        )  # fmt: skip
        up = _multiply_tile(
            x_ptrs, used, w_ptr, scale_ptr, zero_ptr, order, row + N, K, GROUP, HAS_ZERO, HAS_ORDER,
            BLOCK_N, BLOCK_T, BLOCK_K, BIAS, MIDDLE, IS_E2M1, HAS_ASM,
        )  # fmt: skip
        hidden = gate / (1.0 + tl.exp(-gate)) * up
        at = hidden_ptr + place.to(tl.int64)[None, :] * N + column[:, None]
        mask = used[None, :] & (column < N)[:, None]
        tl.store(at, hidden.to(hidden_ptr.dtype.element_ty), mask=mask)


@precompile.jit
def _down(
    hidden_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    order_ptr,
    scaled_ptr,
    pairs_ptr,
    counts_ptr,
    weights_ptr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    MIDDLE: tl.constexpr,
    IS_E2M1: tl.constexpr,
    HAS_ASM: tl.constexpr,
):
    """scaled [pairs, N] = weight * down @ hidden, in the order of tokens. Grid (tiles of N, tiles of pairs)."""
    expert, first, end = find_tile(counts_ptr, tl.program_id(1), E, BLOCK_E, BLOCK_T)
    if expert < E:
        place = first + tl.arange(0, BLOCK_T)
        used = place < end
        at = tl.where(used, place, first).to(tl.int64)
        pair = tl.load(pairs_ptr + at).to(tl.int64)
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        row = expert.to(tl.int64) * N + tl.minimum(column, N - 1)
        order = order_ptr
        if HAS_ORDER:
            order = order_ptr + expert.to(tl.int64) * K
        total = _multiply_tile(
            hidden_ptr + at[None, :] * K, used, w_ptr, scale_ptr, zero_ptr, order, row, K, GROUP,
            HAS_ZERO, HAS_ORDER, BLOCK_N, BLOCK_T, BLOCK_K, BIAS, MIDDLE, IS_E2M1, HAS_ASM,
        )  # fmt: skip
        total *= tl.load(weights_ptr + pair)[None, :]
        mask = used[None, :] & (column < N)[:, None]
        y_ptrs = scaled_ptr + pair[None, :] * N + column[:, None]
        tl.store(y_ptrs, total.to(scaled_ptr.dtype.element_ty), mask=mask)


def moe_experts_w4a16(problem: Problem) -> ExpertsW4A16:
    """Return `experts(x, *gate_up, *down, weights, ids) -> y [T, N]`; shapes as in the contract.

    x may be strided on T; everything else is contiguous. Grids are upper bounds, so CUDA graphs may replay it.
    """
    tilings = tuned_tilings("moe_experts_w4a16", Tiling)
    few_tokens = FewTokensW4(problem, "int4")
    experts = _launcher(problem, tilings, few_tokens, is_e2m1=False)
    codes = partial(precompile.blank, "uint8")

    def blank(num_experts: int, rows: int, columns: int, *, has_zero: bool) -> Weight:
        groups = num_experts, rows, columns // (problem["group_size"] or columns)
        scale = precompile.blank(problem["dtype"], *groups)
        zero = codes(*groups) if has_zero else None
        return codes(num_experts, rows, columns // 2), scale, zero, None

    # In the order of the checkpoint.
    for has_zero in (False, True):
        _precompile(problem, tilings, few_tokens, experts, partial(blank, has_zero=has_zero))
    return experts


def moe_experts_mxfp4(problem: Problem) -> ExpertsMxfp4:
    """Return `experts(x, gate_up, gate_up_scale, down, down_scale, weights, ids) -> y [T, N]`, as `moe_experts_w4a16`."""
    tilings = tuned_tilings("moe_experts_mxfp4", Tiling)
    few_tokens = FewTokensW4(problem, "mxfp4")
    launch = _launcher({**problem, "group_size": MX_GROUP}, tilings, few_tokens, is_e2m1=True)

    def experts(
        x: Tensor,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        down: Tensor,
        down_scale: Tensor,
        weights: Tensor,
        ids: Tensor,
    ) -> Tensor:
        return launch(
            x, gate_up, gate_up_scale, None, None, down, down_scale, None, None, weights, ids
        )

    def blank(num_experts: int, rows: int, columns: int) -> Weight:
        codes = partial(precompile.blank, "uint8", num_experts, rows)
        return codes(columns // 2), codes(columns // MX_GROUP)

    _precompile(problem, tilings, few_tokens, experts, blank)
    return experts


def _launcher(
    problem: Problem, tilings: Tilings, few_tokens: FewTokensW4, *, is_e2m1: bool
) -> ExpertsW4A16:
    """Return a function that runs the experts. Codes are integers, or E2M1 floats with E8M0 scales."""
    num_experts, top_k = problem["num_experts"], problem["top_k"]
    size, inner = problem["hidden_size"], problem["intermediate_size"]
    common = {
        "E": num_experts,
        "BLOCK_E": triton.next_power_of_2(num_experts),
        "BIAS": BIAS[problem["dtype"]],
        "MIDDLE": MIDDLE,
        "IS_E2M1": is_e2m1,
        "HAS_ASM": not triton.knobs.runtime.interpret,
    }

    def groups(in_size: int) -> dict[str, int]:
        group = problem["group_size"] or in_size
        block_k = MAX_BLOCK_K
        while group % block_k:
            block_k //= 2
        return {"K": in_size, "GROUP": group, "BLOCK_K": block_k}

    wide, narrow = groups(size), groups(inner)

    def experts(
        x: Tensor,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        gate_up_zero: Tensor | None,
        gate_up_order: Tensor | None,
        down: Tensor,
        down_scale: Tensor,
        down_zero: Tensor | None,
        down_order: Tensor | None,
        weights: Tensor,
        ids: Tensor,
    ) -> Tensor:
        num_pairs = ids.numel()
        if num_pairs == 0:
            return torch.empty((x.shape[0], size), dtype=x.dtype, device=x.device)
        if num_pairs <= few_tokens.max_pairs:
            up_weight = PackedWeight(gate_up, gate_up_scale, gate_up_zero, gate_up_order)
            down_weight = PackedWeight(down, down_scale, down_zero, down_order)
            return few_tokens(x, up_weight, down_weight, weights, ids)
        pairs, counts = sort_by_expert(ids, num_experts)
        tiling = next(each for bound, each in tilings if num_pairs / num_experts <= bound)
        num_tiles = num_pairs // tiling.block_t + min(num_experts, num_pairs)
        tile = {
            **common,
            "BLOCK_N": tiling.block_n,
            "BLOCK_T": tiling.block_t,
            "num_warps": tiling.num_warps,
            "num_stages": tiling.num_stages,
        }
        hidden = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
        _gate_up[(triton.cdiv(inner, tiling.block_n), num_tiles)](
            x,
            gate_up,
            gate_up_scale,
            gate_up_zero,
            gate_up_order,
            hidden,
            pairs,
            counts,
            x.stride(0),
            TOP_K=top_k,
            N=inner,
            HAS_ZERO=gate_up_zero is not None,
            HAS_ORDER=gate_up_order is not None,
            **wide,
            **tile,
        )
        scaled = torch.empty((num_pairs, size), dtype=x.dtype, device=x.device)
        _down[(triton.cdiv(size, tiling.block_n), num_tiles)](
            hidden,
            down,
            down_scale,
            down_zero,
            down_order,
            scaled,
            pairs,
            counts,
            weights,
            N=size,
            HAS_ZERO=down_zero is not None,
            HAS_ORDER=down_order is not None,
            **narrow,
            **tile,
        )
        return add_up(scaled, ids, num_experts)

    return experts


def _precompile(
    problem: Problem,
    tilings: Tilings,
    few_tokens: FewTokensW4,
    experts: Callable[..., Tensor],
    weight: Callable[[int, int, int], Weight],
) -> None:
    """Compile the kernels of every tiling, and those for few tokens. `weight` makes the tensors of a blank weight [E, O, I]."""
    num_experts, size = problem["num_experts"], problem["hidden_size"]
    inner = problem["intermediate_size"]
    weights = *weight(num_experts, 2 * inner, size), *weight(num_experts, size, inner)
    bounds = [bound for bound, _ in tilings[:-1]]
    next_few = few_tokens.max_pairs // problem["top_k"] + 1
    for num_tokens, *routing in blank_routings(problem, bounds, next_few):
        x = precompile.blank(problem["dtype"], num_tokens, size)
        precompile.compile_for(experts, x, *weights, *routing)
