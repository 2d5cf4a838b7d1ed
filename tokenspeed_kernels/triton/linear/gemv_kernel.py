"""The GEMV kernel: one token times a weight, optionally fused with residual add, RMS norm, gate and FP8."""

from __future__ import annotations

import triton.language as tl

from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.activation.gated import activated
from tokenspeed_kernels.triton.quantize.fp8_per_token import E4M3_MAX, scale_of_row


@precompile.jit
def one_row(
    x_ptr,
    residual_ptr,
    sum_ptr,
    norm_ptr,
    eps,
    w_ptr,
    w_scale_ptr,
    b_ptr,
    y_ptr,
    w_stride,
    N,
    K: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    IS_GELU: tl.constexpr,
    QUANTIZED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Load BLOCK_N whole weight rows into registers and multiply them by the token on the CUDA cores. Grid (N tiles).

    NORM: the input is the RMS norm of x + residual; the sum, rounded, also goes to `sum_ptr`. Every program computes
    it: the row is small, and the weights are being loaded meanwhile.
    GATED: the weight is gate and up stacked, and the result is silu(gate) * up, or gelu(gate) * up.
    QUANTIZED: the weight is e4m3 with per-channel scales, and the input is quantized per token.
    Intermediate results are rounded exactly like those of the unfused ops, so that a token gets the same result alone
    and in a batch.
    PDL: weights, which no kernel writes, are loaded while the previous kernel is still running (see `pdl`).
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < N
    feature = tl.arange(0, BLOCK_K)
    within = feature < K
    mask = inside[:, None] & within[None, :]
    at = column[:, None].to(tl.int64) * w_stride + feature[None, :]
    w = tl.load(w_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")
    if GATED:
        up = tl.load(
            w_ptr + tl.cast(N, tl.int64) * w_stride + at,
            mask=mask,
            other=0.0,
            eviction_policy="evict_first",
        )
    if QUANTIZED:
        w_scale = tl.load(w_scale_ptr + column, mask=inside, other=0.0)
        if GATED:
            up_scale = tl.load(w_scale_ptr + N + column, mask=inside, other=0.0)
    if NORM:
        norm = tl.load(norm_ptr + feature, mask=within, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + feature, mask=within, other=0.0)
    dtype: tl.constexpr = x.dtype
    if NORM:
        residual = tl.load(residual_ptr + feature, mask=within, other=0.0)
        total = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        if tl.program_id(0) == 0:
            tl.store(sum_ptr + feature, total, mask=within)
        wide = total.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / K + eps)
        x = ((wide * scale).to(dtype).to(tl.float32) * norm.to(tl.float32)).to(dtype)
    x = x.to(tl.float32)
    if QUANTIZED:
        x_scale = scale_of_row(x)
        x = (
            tl.minimum(tl.maximum(x / x_scale, -E4M3_MAX), E4M3_MAX)
            .to(tl.float8e4nv)
            .to(tl.float32)
        )
    y = tl.sum(w.to(tl.float32) * x[None, :], axis=1)
    if QUANTIZED:
        y = y * w_scale * x_scale
    if HAS_BIAS:
        y += tl.load(b_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        factor = tl.sum(up.to(tl.float32) * x[None, :], axis=1)
        if QUANTIZED:
            factor = factor * up_scale * x_scale
        if HAS_BIAS:
            factor += tl.load(b_ptr + N + column, mask=inside, other=0.0).to(tl.float32)
        y = y.to(dtype).to(tl.float32)
        y = activated(y, IS_GELU).to(dtype).to(tl.float32) * factor.to(dtype).to(tl.float32)
    tl.store(y_ptr + column, y.to(dtype), mask=inside)
