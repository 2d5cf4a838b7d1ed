"""The two GEMVs of experts with 4-bit weights for few tokens (see `few_tokens_w4`).

A thread loads a packed weight row in runs of 16 bytes, one load per run. The 32 columns of a run share a scale, so the
thread adds up their products and scales the sum once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.linear.gemm_w4a16 import MIDDLE, e8m0

RUN = tl.constexpr(32)  # columns
_NUM_WORDS = tl.constexpr(4)  # of 32 bits, of a run
_MIDDLE = tl.constexpr(MIDDLE)
_NUM_CODES = tl.constexpr(8)  # of a word
_UNIT = tl.constexpr(2.0**-74)  # factor of products and their sums, so that they do not overflow


@triton.jit
def _product(words, x, INDEX: tl.constexpr, IS_E2M1: tl.constexpr):
    """Return the code at INDEX of each word, counted from the lowest bits, times x and _UNIT.

    The bits of a code are used as the bits of a float32, which needs no conversion. This float32 is the value of the code
    divided by a power of two, and is subnormal for integers. x is multiplied by FACTOR, a part of this power, because
    the whole would overflow. The caller divides the sum by _UNIT.
    """
    PLACE: tl.constexpr = 4 * INDEX if INDEX <= 4 else 4 * INDEX - 12
    FACTOR: tl.constexpr = 2.0**52 if IS_E2M1 else 2.0 ** (75 - PLACE)
    if IS_E2M1:
        # Exponent and mantissa are moved to their places in a float32. This is correct for subnormal numbers too. The
        # mask drops copies of the sign.
        bits = ((words << (28 - 4 * INDEX)) >> 6) & -0x7E400000
    elif INDEX <= 4:
        bits = words & (15 << PLACE)
    else:
        bits = (words >> 12) & (15 << PLACE)
    return bits.to(tl.float32, bitcast=True) * (x * FACTOR)


@triton.jit
def _load_rows(
    w_ptr,
    scale_ptr,
    zero_ptr,
    row,
    used,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    IS_E2M1: tl.constexpr,
):
    """Return the words [N, J, BLOCK_R, 4], scales and zero points [N, J, BLOCK_R] of rows [N, J] of a weight.

    Nothing is read for rows that are not used.
    """
    run = tl.arange(0, BLOCK_R)[None, None, :]
    row = row[:, :, None]
    mask = used[:, :, None] & (run < K // RUN)
    word = row[:, :, :, None] * (K // 8) + (run * _NUM_WORDS)[:, :, :, None]
    word += tl.arange(0, _NUM_WORDS)[None, None, None, :]
    words_ptr = w_ptr.to(tl.pointer_type(tl.int32))
    mask_words = mask[:, :, :, None]
    words = tl.load(words_ptr + word, mask=mask_words, other=0, eviction_policy="evict_first")
    group = row * (K // GROUP) + run * RUN // GROUP
    scale = tl.load(scale_ptr + group, mask=mask, other=0)
    scale = e8m0(scale) if IS_E2M1 else scale.to(tl.float32)
    if zero_ptr is None:
        zero = tl.full(scale.shape, _MIDDLE, tl.float32)
    else:
        zero = tl.load(zero_ptr + group, mask=mask, other=0).to(tl.float32)
    return words, scale, zero


@triton.jit
def _load_inputs(
    x_ptrs,
    order_ptrs,
    used,
    J: tl.constexpr,
    K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ADJACENT: tl.constexpr,
):
    """Return the inputs of the eight codes of a word, a tuple of float32 [J, BLOCK_R, 4], for pointers [J].

    Nothing is read for inputs that are not used.
    """
    column = tl.arange(0, BLOCK_R * RUN)[None, :]
    mask = used[:, None] & (column < K)
    if order_ptrs is not None:
        column = tl.load(order_ptrs[:, None] + column, mask=mask, other=0)
    x = tl.load(x_ptrs[:, None] + column, mask=mask, other=0.0).to(tl.float32)
    # The last axes are the words of a run, both bits of a byte's index in a word, and the low and high bits of a byte.
    if ADJACENT:
        x = tl.reshape(x, [J * BLOCK_R, 4, 2, 2, 2])
    else:
        x = tl.permute(tl.reshape(x, [J * BLOCK_R, 2, 4, 2, 2]), [0, 2, 3, 4, 1])
    low, high = tl.split(x)
    low_0, low_1, low_2, low_3 = _columns(low, J, BLOCK_R)
    high_0, high_1, high_2, high_3 = _columns(high, J, BLOCK_R)
    return low_0, high_0, low_1, high_1, low_2, high_2, low_3, high_3


@triton.jit
def _columns(x, J: tl.constexpr, BLOCK_R: tl.constexpr):
    """Return the four columns of x [J * BLOCK_R, 4, 2, 2], each [J, BLOCK_R, 4]."""
    even, odd = tl.split(x)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    shape: tl.constexpr = [J, BLOCK_R, 4]
    return (
        tl.reshape(first, shape),
        tl.reshape(second, shape),
        tl.reshape(third, shape),
        tl.reshape(fourth, shape),
    )


@triton.jit
def _multiply(words, scale, zero, inputs, IS_E2M1: tl.constexpr):
    """Return the products of rows and inputs (see `_load_rows`, `_load_inputs`), float32 [N, J]."""
    if IS_E2M1:
        total = tl.zeros(words.shape, tl.float32)
    else:
        sums = inputs[0]
        for index in tl.static_range(1, _NUM_CODES):
            sums += inputs[index]
        total = zero[:, :, :, None] * (sums * -_UNIT)[None, :, :, :]
    for index in tl.static_range(_NUM_CODES):
        total += _product(words, inputs[index][None, :, :, :], index, IS_E2M1)
    return tl.sum(tl.sum(total, axis=3) * (scale / _UNIT), axis=2)


@precompile.jit
def gate_up(
    x_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    order_ptr,
    bias_ptr,
    ids_ptr,
    hidden_ptr,
    x_stride,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    IS_E2M1: tl.constexpr,
    PDL: tl.constexpr,
):
    """hidden [pairs, N] = silu(gate @ x) * (up @ x) for pairs with an expert. Grid (tiles of N, pairs).

    With biases the activation is a clamped SwiGLU, rows of gate and up alternate, and a byte has adjacent columns.
    PDL: the next kernels may read ids before their own wait, because they start after this one's.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(1)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    if expert < E:
        HAS_BIAS: tl.constexpr = bias_ptr is not None
        column = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
        inside = column < N
        if HAS_BIAS:
            gate_row = expert * (2 * N) + 2 * column
            up_row = gate_row + 1
        else:
            gate_row = expert * (2 * N) + column
            up_row = gate_row + N
        gate_w, gate_scale, gate_zero = _load_rows(
            w_ptr, scale_ptr, zero_ptr, gate_row, inside, K, GROUP, BLOCK_R, IS_E2M1
        )
        up_w, up_scale, up_zero = _load_rows(
            w_ptr, scale_ptr, zero_ptr, up_row, inside, K, GROUP, BLOCK_R, IS_E2M1
        )
        first = tl.arange(0, 1)
        x_row = x_ptr + (pair // TOP_K).to(tl.int64) * x_stride + first
        order = None if order_ptr is None else order_ptr + expert * K + first
        inputs = _load_inputs(x_row, order, first == 0, 1, K, BLOCK_R, HAS_BIAS)
        gate = _multiply(gate_w, gate_scale, gate_zero, inputs, IS_E2M1)
        up = _multiply(up_w, up_scale, up_zero, inputs, IS_E2M1)
        if HAS_BIAS:
            gate += tl.load(bias_ptr + gate_row, mask=inside, other=0.0).to(tl.float32)
            up += tl.load(bias_ptr + up_row, mask=inside, other=0.0).to(tl.float32)
            gate = tl.minimum(gate, LIMIT)
            up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
            hidden = (up + 1.0) * (gate / (1.0 + tl.exp(-ALPHA * gate)))
        else:
            hidden = gate / (1.0 + tl.exp(-gate)) * up
        hidden_ptrs = hidden_ptr + pair * N + column
        tl.store(hidden_ptrs, hidden.to(hidden_ptr.dtype.element_ty), mask=inside)


@precompile.jit
def down(
    hidden_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    order_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    y_ptr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_J: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    IS_E2M1: tl.constexpr,
    PDL: tl.constexpr,
):
    """y [T, N] = the sum over a token's experts of weight * (down @ hidden + bias). Grid (tiles of N, T).

    The tile of weights is [rows, experts, runs, words]: the warps of a program divide the experts, and an input serves
    all rows. Products are rounded as in the kernels for many tokens.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(1)
    rank = tl.arange(0, BLOCK_J)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < N
    pair = token * TOP_K + rank
    expert = tl.load(ids_ptr + pair, mask=rank < TOP_K, other=E).to(tl.int64)
    used = expert < E
    weight = tl.load(weights_ptr + pair, mask=used, other=0.0)
    row = expert[None, :] * N + column[:, None]
    mask = inside[:, None] & used[None, :]
    w, scale, zero = _load_rows(w_ptr, scale_ptr, zero_ptr, row, mask, K, GROUP, BLOCK_R, IS_E2M1)
    if PDL:
        tl.extra.cuda.gdc_wait()
    order = None if order_ptr is None else order_ptr + expert * K
    has_bias: tl.constexpr = bias_ptr is not None
    rows = hidden_ptr + pair * K
    inputs = _load_inputs(rows, order, used, BLOCK_J, K, BLOCK_R, has_bias)
    product = _multiply(w, scale, zero, inputs, IS_E2M1)
    if has_bias:
        product += tl.load(bias_ptr + row, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    scaled = (product * weight[None, :]).to(dtype).to(tl.float32)
    y = tl.sum(scaled, axis=1)
    tl.store(y_ptr + token.to(tl.int64) * N + column, y.to(dtype), mask=inside)
