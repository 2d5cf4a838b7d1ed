"""FP8 (e4m3) and INT8 mixture of experts: grouped GEMMs over tokens sorted by expert.

Weights have per-channel scales, and activations per-token or static ones; or scales are block-wise: 1 x 128 for
activations and 128 x 128 for weights. As in `gemm_fp8`, the weight is the wide side of a tile and an expert's few
tokens the narrow one. The hidden state is quantized by a separate launch, because its scales depend on many features.
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
from tokenspeed_kernels.reference.fp8 import Quantize, QuantizeStatic
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.moe.experts import add_up, blank_routings, sort_by_expert
from tokenspeed_kernels.triton.moe.kernel import find_tile
from tokenspeed_kernels.triton.quantize.fp8_per_group import GROUP, quantize_fp8_groups
from tokenspeed_kernels.triton.quantize.fp8_per_token import quantize_fp8
from tokenspeed_kernels.triton.quantize.integer import (
    quantize_fp8_static,
    quantize_int8,
    quantize_int8_static,
)

MAX_INEXACT = 128  # products summed in the tensor cores' short accumulator before a float32 sum

Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
ExpertsStatic = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor
]


@dataclass(frozen=True, slots=True)
class Tiling:
    """Weight rows and pairs per tile, features per iteration, warps, pipeline stages."""

    block_n: int
    block_t: int
    block_k: int
    num_warps: int
    num_stages: int


# (largest average of pairs per expert, tiling)
Tilings = tuple[tuple[float, Tiling], ...]
TILINGS: Tilings = (
    (8.0, Tiling(64, 16, 128, 4, 4)),
    (24.0, Tiling(64, 32, 128, 4, 4)),
    (64.0, Tiling(64, 64, 128, 4, 3)),
    (float("inf"), Tiling(128, 128, 128, 8, 3)),
)
# With block-wise scales, `block_k` is the side of a block, and `block_n` divides it, so that a tile of the weight has
# one scale per iteration. Partial results need registers, so that tiles are smaller.
BLOCK_TILINGS: Tilings = (
    (8.0, Tiling(64, 16, GROUP, 4, 4)),
    (24.0, Tiling(64, 32, GROUP, 4, 4)),
    (64.0, Tiling(64, 64, GROUP, 4, 3)),
    (float("inf"), Tiling(64, 128, GROUP, 8, 3)),
)


@precompile.jit
def _gate_up(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    hidden_ptr,
    pairs_ptr,
    counts_ptr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MAX_INEXACT: tl.constexpr,
    IS_BLOCKWISE: tl.constexpr,
):
    """hidden [pairs, N] = silu(gate @ x) * (up @ x), in sorted order. Grid (tiles of N, tiles of pairs)."""
    expert, first, end = find_tile(counts_ptr, tl.program_id(1), E, BLOCK_E, BLOCK_T)
    if expert < E:
        place = first + tl.arange(0, BLOCK_T)
        used = place < end
        token = (tl.load(pairs_ptr + place, mask=used, other=0) // TOP_K).to(tl.int64)
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        row = expert.to(tl.int64) * (2 * N) + tl.minimum(column, N - 1)
        k = tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + token[None, :] * K + k[:, None]
        gate_ptrs = w_ptr + row[:, None] * K + k[None, :]
        up_ptrs = gate_ptrs + N * K
        num_groups: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
        if IS_BLOCKWISE:
            block_row = (
                expert.to(tl.int64) * (2 * N // BLOCK_K) + tl.program_id(0) * BLOCK_N // BLOCK_K
            )
            gate_scale_ptr = w_scale_ptr + block_row * num_groups
            up_scale_ptr = gate_scale_ptr + N // BLOCK_K * num_groups
            x_scale_ptrs = x_scale_ptr + token * num_groups
        sum_type: tl.constexpr = tl.int32 if w_ptr.dtype.element_ty == tl.int8 else tl.float32
        gate = tl.zeros((BLOCK_N, BLOCK_T), sum_type)
        up = tl.zeros((BLOCK_N, BLOCK_T), sum_type)
        for start in tl.range(0, K, BLOCK_K):
            if K % BLOCK_K == 0:
                x = tl.load(x_ptrs + start, mask=used[None, :], other=0.0)
                gate_w, up_w = tl.load(gate_ptrs + start), tl.load(up_ptrs + start)
            else:
                inside = k < K - start
                x = tl.load(x_ptrs + start, mask=used[None, :] & inside[:, None], other=0.0)
                gate_w = tl.load(gate_ptrs + start, mask=inside[None, :], other=0.0)
                up_w = tl.load(up_ptrs + start, mask=inside[None, :], other=0.0)
            if IS_BLOCKWISE:
                group = start // BLOCK_K
                x_scale = tl.load(x_scale_ptrs + group)
                gate += tl.dot(gate_w, x) * (x_scale * tl.load(gate_scale_ptr + group))[None, :]
                up += tl.dot(up_w, x) * (x_scale * tl.load(up_scale_ptr + group))[None, :]
            elif sum_type == tl.int32:
                gate = tl.dot(gate_w, x, gate, out_dtype=tl.int32)
                up = tl.dot(up_w, x, up, out_dtype=tl.int32)
            else:
                gate = tl.dot(gate_w, x, gate, max_num_imprecise_acc=MAX_INEXACT)
                up = tl.dot(up_w, x, up, max_num_imprecise_acc=MAX_INEXACT)
        if not IS_BLOCKWISE:
            x_scale = tl.load(x_scale_ptr + token)[None, :]
            gate = gate.to(tl.float32) * (x_scale * tl.load(w_scale_ptr + row)[:, None])
            up = up.to(tl.float32) * (x_scale * tl.load(w_scale_ptr + row + N)[:, None])
        hidden = gate / (1.0 + tl.exp(-gate)) * up
        hidden_ptrs = hidden_ptr + place.to(tl.int64)[None, :] * N + column[:, None]
        tl.store(
            hidden_ptrs,
            hidden.to(hidden_ptr.dtype.element_ty),
            mask=used[None, :] & (column < N)[:, None],
        )


@precompile.jit
def _down(
    hidden_ptr,
    hidden_scale_ptr,
    w_ptr,
    w_scale_ptr,
    scaled_ptr,
    pairs_ptr,
    counts_ptr,
    weights_ptr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MAX_INEXACT: tl.constexpr,
    IS_BLOCKWISE: tl.constexpr,
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
        k = tl.arange(0, BLOCK_K)
        hidden_ptrs = hidden_ptr + at[None, :] * K + k[:, None]
        w_ptrs = w_ptr + row[:, None] * K + k[None, :]
        num_groups: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
        if IS_BLOCKWISE:
            block_rows: tl.constexpr = (N + BLOCK_K - 1) // BLOCK_K
            block_row = expert.to(tl.int64) * block_rows + tl.program_id(0) * BLOCK_N // BLOCK_K
            block_scale_ptr = w_scale_ptr + block_row * num_groups
            hidden_scale_ptrs = hidden_scale_ptr + at * num_groups
        sum_type: tl.constexpr = tl.int32 if w_ptr.dtype.element_ty == tl.int8 else tl.float32
        total = tl.zeros((BLOCK_N, BLOCK_T), sum_type)
        for start in tl.range(0, K, BLOCK_K):
            if K % BLOCK_K == 0:
                hidden, w = (
                    tl.load(hidden_ptrs + start, mask=used[None, :], other=0.0),
                    tl.load(w_ptrs + start),
                )
            else:
                inside = k < K - start
                hidden = tl.load(
                    hidden_ptrs + start, mask=used[None, :] & inside[:, None], other=0.0
                )
                w = tl.load(w_ptrs + start, mask=inside[None, :], other=0.0)
            if IS_BLOCKWISE:
                group = start // BLOCK_K
                scale = tl.load(hidden_scale_ptrs + group) * tl.load(block_scale_ptr + group)
                total += tl.dot(w, hidden) * scale[None, :]
            elif sum_type == tl.int32:
                total = tl.dot(w, hidden, total, out_dtype=tl.int32)
            else:
                total = tl.dot(w, hidden, total, max_num_imprecise_acc=MAX_INEXACT)
        if not IS_BLOCKWISE:
            total = total.to(tl.float32) * tl.load(w_scale_ptr + row)[:, None]
            total *= tl.load(hidden_scale_ptr + at)[None, :]
        total *= tl.load(weights_ptr + pair)[None, :]
        scaled_ptrs = scaled_ptr + pair[None, :] * N + column[:, None]
        tl.store(
            scaled_ptrs,
            total.to(scaled_ptr.dtype.element_ty),
            mask=used[None, :] & (column < N)[:, None],
        )


def moe_experts_fp8(problem: Problem) -> Experts:
    """Return `experts(x, gate_up, gate_up_scale, down, down_scale, weights, ids) -> y [T, N]`; shapes as in the contract.

    x may be strided on T; everything else is contiguous. Grids are upper bounds, so CUDA graphs may replay it.
    """
    return _per_channel(problem, "float8_e4m3fn", quantize_fp8)


def moe_experts_int8(problem: Problem) -> Experts:
    """Return the experts with INT8 weights and activations; otherwise as `moe_experts_fp8`."""
    return _per_channel(problem, "int8", quantize_int8)


def moe_experts_fp8_static(problem: Problem) -> ExpertsStatic:
    """Return `experts(x, gate_up_input, gate_up, …scale, down_input, down, …scale, weights, ids) -> y [T, N]`.

    `gate_up_input` and `down_input` are the scales of the activations. Otherwise as `moe_experts_fp8`.
    """
    return _per_channel_static(problem, "float8_e4m3fn", quantize_fp8_static)


def moe_experts_int8_static(problem: Problem) -> ExpertsStatic:
    """Return the experts with INT8 weights and activations; otherwise as `moe_experts_fp8_static`."""
    return _per_channel_static(problem, "int8", quantize_int8_static)


def moe_experts_fp8_block(problem: Problem) -> Experts:
    """Return `experts(x, gate_up, gate_up_scale, down, down_scale, weights, ids) -> y [T, N]`, with block-wise scales.

    Otherwise as `moe_experts_fp8`.
    """
    runner = _Experts(problem, BLOCK_TILINGS, is_blockwise=True)
    experts = _dynamic(problem, runner, quantize_fp8_groups)
    size, inner = triton.cdiv(problem["hidden_size"], GROUP), problem["intermediate_size"] // GROUP
    runner.precompile(experts, "float8_e4m3fn", (2 * inner, size), (size, inner))
    return experts


def _per_channel(
    problem: Problem, dtype: str, make_quantize: Callable[[Problem], Quantize]
) -> Experts:
    runner = _Experts(problem, TILINGS, is_blockwise=False)
    experts = _dynamic(problem, runner, make_quantize)
    runner.precompile(experts, dtype, (2 * runner.inner, 1), (runner.size, 1))
    return experts


def _dynamic(
    problem: Problem, runner: _Experts, make_quantize: Callable[[Problem], Quantize]
) -> Experts:
    """Return the function that runs the experts; it computes the scales of their inputs."""
    quantize_tokens = make_quantize({**problem, "size": runner.size})
    quantize_hidden = make_quantize({**problem, "size": runner.inner})

    def experts(
        x: Tensor,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        down: Tensor,
        down_scale: Tensor,
        weights: Tensor,
        ids: Tensor,
    ) -> Tensor:
        return runner(
            (x, weights, ids),
            (gate_up, gate_up_scale, quantize_tokens),
            (down, down_scale, quantize_hidden),
        )

    return experts


def _per_channel_static(
    problem: Problem, dtype: str, make_quantize: Callable[[Problem], QuantizeStatic]
) -> ExpertsStatic:
    """Return the function that runs the experts; the scales of their inputs are arguments."""
    runner = _Experts(problem, TILINGS, is_blockwise=False)
    quantize_tokens = make_quantize({**problem, "size": runner.size})
    quantize_hidden = make_quantize({**problem, "size": runner.inner})

    def experts(
        x: Tensor,
        gate_up_input: Tensor,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        down_input: Tensor,
        down: Tensor,
        down_scale: Tensor,
        weights: Tensor,
        ids: Tensor,
    ) -> Tensor:
        return runner(
            (x, weights, ids),
            (gate_up, gate_up_scale, lambda rows: quantize_tokens(rows, gate_up_input)),
            (down, down_scale, lambda rows: quantize_hidden(rows, down_input)),
        )

    runner.precompile(experts, dtype, (2 * runner.inner, 1), (runner.size, 1), is_static=True)
    return experts


class _Experts:
    """Launches the kernels for one kind of scales."""

    def __init__(self, problem: Problem, tilings: Tilings, *, is_blockwise: bool) -> None:
        self._problem, self._tilings, self._is_blockwise = problem, tilings, is_blockwise
        self._num_experts, self._top_k = problem["num_experts"], problem["top_k"]
        self.size, self.inner = problem["hidden_size"], problem["intermediate_size"]

    def __call__(
        self,
        routed: tuple[Tensor, Tensor, Tensor],
        gate_up: tuple[Tensor, Tensor, Quantize],
        down: tuple[Tensor, Tensor, Quantize],
    ) -> Tensor:
        """Return y [T, N] for x, routing weights and ids.

        A weight comes with its scales and the function that quantizes its inputs.
        """
        x, weights, ids = routed
        num_pairs, num_experts = ids.numel(), self._num_experts
        size, inner = self.size, self.inner
        if num_pairs == 0:
            return torch.empty((x.shape[0], size), dtype=x.dtype, device=x.device)
        pairs, counts = sort_by_expert(ids, num_experts)
        tiling = next(each for bound, each in self._tilings if num_pairs / num_experts <= bound)
        num_tiles = num_pairs // tiling.block_t + min(num_experts, num_pairs)
        tile = {
            "E": num_experts,
            "BLOCK_E": triton.next_power_of_2(num_experts),
            "BLOCK_N": tiling.block_n,
            "BLOCK_T": tiling.block_t,
            "BLOCK_K": tiling.block_k,
            "MAX_INEXACT": MAX_INEXACT,
            "IS_BLOCKWISE": self._is_blockwise,
            "num_warps": tiling.num_warps,
            "num_stages": tiling.num_stages,
        }
        hidden = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
        codes, scale, quantize = gate_up
        _gate_up[(triton.cdiv(inner, tiling.block_n), num_tiles)](
            *quantize(x),
            codes,
            scale,
            hidden,
            pairs,
            counts,
            TOP_K=self._top_k,
            N=inner,
            K=size,
            **tile,
        )
        scaled = torch.empty((num_pairs, size), dtype=x.dtype, device=x.device)
        codes, scale, quantize = down
        _down[(triton.cdiv(size, tiling.block_n), num_tiles)](
            *quantize(hidden),
            codes,
            scale,
            scaled,
            pairs,
            counts,
            weights,
            N=size,
            K=inner,
            **tile,
        )
        return add_up(scaled, ids, num_experts)

    def precompile(
        self,
        experts: Callable[..., Tensor],
        dtype: str,
        gate_up_scale: tuple[int, int],
        down_scale: tuple[int, int],
        *,
        is_static: bool = False,
    ) -> None:
        """Compile the kernels of every tiling, for scales of the given shapes per expert."""
        num_experts, size, inner = self._num_experts, self.size, self.inner
        codes, scales = partial(precompile.blank, dtype), partial(precompile.blank, "float32")
        given = (scales(1),) if is_static else ()
        weights = (
            *given,
            codes(num_experts, 2 * inner, size),
            scales(num_experts, *gate_up_scale),
            *given,
            codes(num_experts, size, inner),
            scales(num_experts, *down_scale),
        )
        bounds = [bound for bound, _ in self._tilings[:-1]]
        for num_tokens, *routing in blank_routings(self._problem, bounds):
            x = precompile.blank(self._problem["dtype"], num_tokens, size)
            precompile.compile_for(experts, x, *weights, *routing)
