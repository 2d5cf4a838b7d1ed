"""The kernel of `fused_block`: its phases and the grid-wide barrier between them."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernels.triton import precompile

NUM_PHASES = 6


@triton.jit
def _barrier(counter_ptr, PROGRAMS: tl.constexpr):
    """Wait until all programs have arrived.

    Each round adds 2**31 to the counter in total, so its top bit flips when the last program arrives, and nothing has
    to be reset before the next round or launch. All programs must be running at the same time.
    """
    add = tl.where(tl.program_id(0) == 0, 0x80000000 - (PROGRAMS - 1), 1).to(tl.uint32)
    tl.inline_asm_elementwise(
        """{
        .reg .pred p, q; .reg .u32 t, old, now;
        bar.sync 0;
        mov.u32 t, %tid.x;
        setp.ne.u32 p, t, 0;
        @p bra DONE;
        atom.add.release.gpu.global.u32 old, [$1], $2;
        WAIT:
        ld.acquire.gpu.global.u32 now, [$1];
        xor.b32 now, now, old;
        setp.ge.s32 q, now, 0;
        @q bra WAIT;
        DONE:
        bar.sync 0;
        mov.u32 $0, 0;
        }""",
        "=r,l,r,~{memory}",
        [counter_ptr.to(tl.uint64, bitcast=True), add],
        dtype=tl.uint32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _product(
    x_ptr,
    x_stride,
    w_ptr,
    T,
    row,
    inside,
    start,
    shift,
    K: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return x [T, K] @ w[row].T over LENGTH features from `start`, in float32 [BLOCK_T, BLOCK_N].

    Programs begin at different features (`shift`), so that they do not all load the same lines of x at once. Loads
    bypass the L1 cache, which may hold values from before other programs wrote.
    """
    t, k = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)
    x_at = x_ptr + t[:, None] * x_stride + (start + k)[None, :]
    w_at = w_ptr + row[:, None].to(tl.int64) * K + (start + k)[None, :]
    product = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    STEPS: tl.constexpr = LENGTH // BLOCK_K
    for step in tl.range(0, STEPS, num_stages=STAGES):
        at = (step + shift) % STEPS * BLOCK_K
        x = tl.load(x_at + at, mask=(t < T)[:, None], other=0.0, cache_modifier=".cg")
        w = tl.load(w_at + at, mask=inside[:, None], other=0.0, cache_modifier=".cg")
        product = tl.dot(x, w.T, product)
    return product


@triton.jit
def _partial_product(
    x_ptr,
    x_stride,
    w_ptr,
    sums_ptr,
    T,
    tile,
    K: tl.constexpr,
    N: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write a tile of x @ w.T over one split of the features to sums [SPLIT, T, N] in float32."""
    part, column = tile % SPLIT, tile // SPLIT * BLOCK_N + tl.arange(0, BLOCK_N)
    LENGTH: tl.constexpr = K // SPLIT
    y = _product(
        x_ptr,
        x_stride,
        w_ptr,
        T,
        column,
        column < N,
        part * LENGTH,
        tile // SPLIT,
        K,
        LENGTH,
        BLOCK_T,
        BLOCK_N,
        BLOCK_K,
        STAGES,
    )
    t = tl.arange(0, BLOCK_T)
    inside = (t < T)[:, None] & (column < N)[None, :]
    tl.store(sums_ptr + (part * T + t)[:, None] * N + column[None, :], y, mask=inside)


@triton.jit
def _add_norm(
    sums_ptr,
    before_ptr,
    before_stride,
    norm,
    eps,
    total_ptr,
    y_ptr,
    T,
    row,
    column,
    N: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """total = rounded sum of a row's splits + `before`; y = RMS norm of total. Store both."""
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    inside = column < N
    x = tl.load(sums_ptr + row * N + column, mask=inside, other=0.0, cache_modifier=".cg")
    for part in tl.static_range(1, SPLIT):
        x += tl.load(
            sums_ptr + (part * T + row) * N + column, mask=inside, other=0.0, cache_modifier=".cg"
        )
    before = tl.load(
        before_ptr + row * before_stride + column, mask=inside, other=0.0, cache_modifier=".cg"
    )
    total = (x.to(dtype).to(tl.float32) + before.to(tl.float32)).to(dtype)
    tl.store(total_ptr + row * N + column, total, mask=inside)
    wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / N + eps)
    y = (wide * scale).to(dtype).to(tl.float32) * norm.to(tl.float32)
    tl.store(y_ptr + row * N + column, y.to(dtype), mask=inside)


@triton.jit
def _gated(
    x_ptr,
    w_ptr,
    y_ptr,
    T,
    tile,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    NUM_N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write NUM_N features of silu(x @ gate.T) * (x @ up.T); w [2N, K] is gate and up stacked."""
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    lane = tl.arange(0, 2 * BLOCK_N)
    feature = tile * NUM_N + lane % BLOCK_N
    inside = (lane % BLOCK_N < NUM_N) & (feature < N)
    both = _product(
        x_ptr,
        K,
        w_ptr,
        T,
        lane // BLOCK_N * N + feature,
        inside,
        0,
        tile,
        K,
        K,
        BLOCK_T,
        2 * BLOCK_N,
        BLOCK_K,
        STAGES,
    )
    gate, up = tl.split(tl.permute(tl.reshape(both, (BLOCK_T, 2, BLOCK_N)), (0, 2, 1)))
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    y = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
    t, n = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_N)
    column = tile * NUM_N + n
    inside = (t < T)[:, None] & ((n < NUM_N) & (column < N))[None, :]
    tl.store(y_ptr + t[:, None] * N + column[None, :], y.to(dtype), mask=inside)


@precompile.jit(do_not_specialize=["T"])
def fused_block_kernel(
    x_ptr,
    residual_ptr,
    out_ptr,
    norm_ptr,
    gate_up_ptr,
    down_ptr,
    next_norm_ptr,
    qkv_ptr,
    sums_ptr,
    normed_ptr,
    middle_ptr,
    gated_ptr,
    total_ptr,
    y_ptr,
    counter_ptr,
    x_stride,
    residual_stride,
    T,
    eps,
    A: tl.constexpr,
    H: tl.constexpr,
    M: tl.constexpr,
    Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    O_N: tl.constexpr,
    O_SPLIT: tl.constexpr,
    O_K: tl.constexpr,
    G_N: tl.constexpr,
    G_BLOCK: tl.constexpr,
    G_K: tl.constexpr,
    D_N: tl.constexpr,
    D_SPLIT: tl.constexpr,
    D_K: tl.constexpr,
    Q_N: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    Q_K: tl.constexpr,
    STAGES: tl.constexpr,
    G_STAGES: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Run phases FIRST to LAST for attention output x [T, A] and residual [T, H]. Grid (PROGRAMS).

    0: sums = x @ out.T, split over programs
    1: middle = sums + residual; normed = RMS norm of middle
    2: gated = SwiGLU of normed @ gate_up.T
    3: sums = gated @ down.T, split over programs
    4: total = sums + middle; normed = RMS norm of total
    5: y = normed @ qkv.T
    """
    dtype: tl.constexpr = normed_ptr.dtype.element_ty
    pid = tl.program_id(0)
    column = tl.arange(0, BLOCK_H)
    norm = tl.load(norm_ptr + column, mask=column < H, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if FIRST <= 0:
        for tile in range(pid, tl.cdiv(H, O_N) * O_SPLIT, PROGRAMS):
            _partial_product(
                x_ptr,
                x_stride,
                out_ptr,
                sums_ptr,
                T,
                tile,
                A,
                H,
                O_SPLIT,
                BLOCK_T,
                O_N,
                O_K,
                STAGES,
            )
        if LAST > 0:
            _barrier(counter_ptr, PROGRAMS)
    if (FIRST <= 1) & (LAST >= 1):
        for row in range(pid, T, PROGRAMS):
            _add_norm(
                sums_ptr,
                residual_ptr,
                residual_stride,
                norm,
                eps,
                middle_ptr,
                normed_ptr,
                T,
                row,
                column,
                H,
                O_SPLIT,
            )
        if LAST > 1:
            _barrier(counter_ptr, PROGRAMS)
    if (FIRST <= 2) & (LAST >= 2):
        for tile in range(pid, tl.cdiv(M, G_N), PROGRAMS):
            _gated(
                normed_ptr,
                gate_up_ptr,
                gated_ptr,
                T,
                tile,
                H,
                M,
                BLOCK_T,
                G_N,
                G_BLOCK,
                G_K,
                G_STAGES,
            )
        if LAST > 2:
            _barrier(counter_ptr, PROGRAMS)
    if (FIRST <= 3) & (LAST >= 3):
        for tile in range(pid, tl.cdiv(H, D_N) * D_SPLIT, PROGRAMS):
            _partial_product(
                gated_ptr, M, down_ptr, sums_ptr, T, tile, M, H, D_SPLIT, BLOCK_T, D_N, D_K, STAGES
            )
        if LAST > 3:
            _barrier(counter_ptr, PROGRAMS)
    if (FIRST <= 4) & (LAST >= 4):
        next_norm = tl.load(next_norm_ptr + column, mask=column < H, other=0.0)
        for row in range(pid, T, PROGRAMS):
            _add_norm(
                sums_ptr,
                middle_ptr,
                H,
                next_norm,
                eps,
                total_ptr,
                normed_ptr,
                T,
                row,
                column,
                H,
                D_SPLIT,
            )
        if LAST > 4:
            _barrier(counter_ptr, PROGRAMS)
    if (FIRST <= 5) & (LAST >= 5):
        for tile in range(pid, tl.cdiv(Q, Q_N), PROGRAMS):
            lane, t = tl.arange(0, Q_BLOCK), tl.arange(0, BLOCK_T)
            n = tile * Q_N + lane
            inside = (lane < Q_N) & (n < Q)
            y = _product(
                normed_ptr, H, qkv_ptr, T, n, inside, 0, tile, H, H, BLOCK_T, Q_BLOCK, Q_K, STAGES
            )
            tl.store(
                y_ptr + t[:, None] * Q + n[None, :],
                y.to(dtype),
                mask=(t < T)[:, None] & inside[None, :],
            )
