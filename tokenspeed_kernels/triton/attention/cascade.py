"""Cascade (shared-prefix) attention for decode rows: keys that a group of rows shares are read once.

Rows share keys when their block tables start with the same blocks, for example those of a common system prompt. The
group and the length of its prefix are computed on the device once per forward, so a captured graph finds them in each
replay. Each row of the group attends to the rest of its keys separately, and both results are merged by their
log-sum-exp. Rows outside the group attend to all of their keys separately.
Sources: cascade attention (Ye et al., 2024) and Hydragen (Juravsky et al., 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed_core.api import AttentionLimits, AttentionProblem, AttentionStep
from tokenspeed_kernels.reference.cache import MIN_SHARED_TOKENS, MIN_SHARING_ROWS
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.attention.keys import (
    LOG2_E,
    attend_keys,
    fit_keys,
    keys_per_split,
    soft_cap,
)
from tokenspeed_kernels.triton.attention.shared_prefix import MANY_ROWS, fill_found
from tokenspeed_kernels.triton.pdl import supports_pdl

# Number of partial results that a program merges together, which is the maximum number of splits of the shared keys.
MERGED_PARTS = 8
MAX_SLOTS = 65536  # partial results: one per query head, row and split
MAX_BLOCK_M = 64  # query heads in a tile, from several rows
BLOCK_N = 32  # keys per loop iteration
PART = 64  # keys; the sizes of parts are multiples of it
MAX_PARTS = 1024  # of a step with few rows


@dataclass(frozen=True, slots=True)
class SharedLaunch:
    """Launch parameters of attention to the shared keys: tiles over rows, splits over keys.

    The other keys of all rows are divided into up to `num_parts` parts.
    """

    num_rows: int
    block_m: int
    num_tiles: int
    num_shared_splits: int
    num_parts: int


class SharedPrefix:
    """Finds the shared keys of a step's decode rows and attends to them.

    `found` int32 [2 + S]: the number of shared keys, a multiple of BLOCK_N; the index of a row that has them; and for
    each row the number, or 0 if it does not have them.
    `parts` int32 [4 * parts]: the parts of the other keys (see `divide_keys`).
    `partial` float32 [S * H * splits, V] and `lse` float32 [S * H * splits]: each query head's partial results.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        limits: AttentionLimits,
        device: torch.device,
        block_d: int,
        block_v: int,
    ) -> None:
        """Allocate buffers for the largest launch within `limits`."""
        self._problem, self._block_d, self._block_v = problem, block_d, block_v
        self._num_groups = problem.num_heads // problem.num_kv_heads
        self._pdl = supports_pdl()
        wide = problem.dtype == "float32" or max(block_d, block_v) > 128
        self._max_block_m = max(
            MAX_BLOCK_M // 2 if wide else MAX_BLOCK_M, triton.next_power_of_2(self._num_groups)
        )
        self._num_stages = 2 if wide else 5
        self._is_possible = (
            problem.phase == "decode"
            and problem.window is None
            and limits.max_num_rows >= MIN_SHARING_ROWS
            and limits.max_model_len > MIN_SHARED_TOKENS
        )
        num_heads = limits.max_num_rows * problem.num_heads
        num_slots = (
            max(num_heads, min(MERGED_PARTS * num_heads, MAX_SLOTS)) if self._is_possible else 1
        )
        self._max_parts = 2 * limits.max_num_rows + MAX_PARTS
        self.parts = torch.zeros(4 * self._max_parts, dtype=torch.int32, device=device)
        self.found = torch.zeros(2 + limits.max_num_rows, dtype=torch.int32, device=device)
        self.partial = torch.empty((num_slots, block_v), dtype=torch.float32, device=device)
        self.lse = torch.empty(num_slots, dtype=torch.float32, device=device)

    def launch(self, num_rows: int, max_parts: int, wanted_parts: int) -> SharedLaunch | None:
        """Return the launch for a step with one query token per row, or None if there is nothing to gain.

        The keys that are not shared are divided into parts, at least one per row. Their number is the larger of
        `wanted_parts` and 1.5 per row, and at most `max_parts`.
        """
        if not self._is_possible or num_rows < MIN_SHARING_ROWS:
            return None
        block_m = min(
            self._max_block_m, max(16, triton.next_power_of_2(num_rows * self._num_groups))
        )
        num_tiles = -(-num_rows // (block_m // self._num_groups))
        room = self.lse.shape[0] // (num_rows * self._problem.num_heads)
        parts = min(max(wanted_parts, num_rows + num_rows // 2), max_parts, self._max_parts)
        return SharedLaunch(num_rows, block_m, num_tiles, min(room, MERGED_PARTS), parts)

    def find(self, step: AttentionStep, launch: SharedLaunch, max_splits: int) -> None:
        """Fill `found` from the step's block table, and `parts` with at most `max_splits` parts of a row."""
        block_size = self._problem.block_size
        fill_found(step.seq_lens, step.block_table, self.found, block_size, BLOCK_N, min_reads=0)
        divide_keys[(1,)](
            step.seq_lens,
            self.found,
            self.parts,
            launch.num_rows,
            launch.num_parts,
            min(max_splits, MERGED_PARTS**2),
            PART=PART,
            MANY_ROWS=MANY_ROWS,
            num_warps=8,
        )

    def attend(
        self, step: AttentionStep, launch: SharedLaunch, q: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> None:
        """Fill `partial` and `lse` for one layer if keys are shared. Must be the first launch of the layer."""
        problem = self._problem
        attend_shared[(launch.num_shared_splits, problem.num_kv_heads, launch.num_tiles)](
            q,
            k_cache,
            v_cache,
            self.partial,
            self.lse,
            self.found,
            step.query_start,
            step.block_table,
            launch.num_rows,
            launch.num_shared_splits,
            problem.scale * LOG2_E,
            q.stride(0),
            q.stride(1),
            *k_cache.stride()[:3],
            *v_cache.stride()[1:3],
            step.block_table.stride(0),
            G=self._num_groups,
            K=problem.num_kv_heads,
            D=problem.head_size,
            BLOCK_D=self._block_d,
            V=problem.out_size,
            BLOCK_V=self._block_v,
            BLOCK_SIZE=problem.block_size,
            BLOCK_M=launch.block_m,
            BLOCK_N=BLOCK_N,
            SOFT_CAP=soft_cap(problem),
            PRECISION="ieee" if problem.dtype == "float32" else "tf32",
            PDL=self._pdl,
            num_warps=4,
            num_stages=self._num_stages,
            launch_pdl=self._pdl,
        )


@triton.jit
def _num_own_parts(seq_lens_ptr, found_ptr, row, num_rows, part, PART: tl.constexpr):
    """Return the number of parts of `part` times PART keys in the keys that some rows do not share, at least one per row."""
    inside = row < num_rows
    seq_len = tl.load(seq_lens_ptr + row, mask=inside, other=0)
    own = seq_len - tl.load(found_ptr + 2 + row, mask=inside, other=0)
    return tl.where(inside, tl.maximum(tl.cdiv(own, part * PART), 1), 0)


@precompile.jit(
    do_not_specialize=["num_rows", "num_parts", "max_splits"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "found_ptr", "parts_ptr"],
)
def divide_keys(
    seq_lens_ptr,
    found_ptr,
    parts_ptr,
    num_rows,
    num_parts,
    max_splits,
    PART: tl.constexpr,
    MANY_ROWS: tl.constexpr,
):
    """Divide the keys that rows do not share into parts of equal size, at most `num_parts`. One program.

    Stores four integers per part: its row, or -1 if the part is unused; its index in the row << 16 | the row's number of
    parts; its first key; and the key after its last one. The size is the smallest multiple of PART for which the parts
    suffice. A row has one to `max_splits` consecutive parts; a single part may be empty.
    """
    many = tl.arange(0, MANY_ROWS)
    total = tl.zeros([], dtype=tl.int32)
    longest = tl.zeros([], dtype=tl.int32)
    for first_row in range(0, num_rows, MANY_ROWS):
        count = _num_own_parts(seq_lens_ptr, found_ptr, first_row + many, num_rows, 1, PART)
        total += tl.sum(count, axis=0)
        longest = tl.maximum(longest, tl.max(count, axis=0))
    low = tl.maximum(tl.cdiv(total, num_parts), tl.cdiv(longest, max_splits))
    # A size that suffices: at most num_parts - num_rows parts are full, and each row has at most one other part.
    high = tl.where(num_parts > num_rows, tl.cdiv(total, num_parts - num_rows), longest)
    high = tl.maximum(tl.minimum(high, longest), low)
    while low < high:
        middle = (low + high) // 2
        count = tl.zeros([], dtype=tl.int32)
        for first_row in range(0, num_rows, MANY_ROWS):
            row = first_row + many
            count += tl.sum(
                _num_own_parts(seq_lens_ptr, found_ptr, row, num_rows, middle, PART), axis=0
            )
        high = tl.where(count <= num_parts, middle, high)
        low = tl.where(count <= num_parts, low, middle + 1)
    before = tl.zeros([], dtype=tl.int32)
    for first_row in range(0, num_rows, MANY_ROWS):
        row = first_row + many
        count = _num_own_parts(seq_lens_ptr, found_ptr, row, num_rows, high, PART)
        inside = row < num_rows
        stop = tl.load(seq_lens_ptr + row, mask=inside, other=0)
        start = tl.load(found_ptr + 2 + row, mask=inside, other=0)
        part_ptr = parts_ptr + 4 * (before + tl.cumsum(count, axis=0) - count)
        most = tl.max(count, axis=0)
        for index in range(most):
            end = tl.minimum(start + high * PART, stop)
            is_part = index < count
            tl.store(part_ptr, row, mask=is_part)
            tl.store(part_ptr + 1, index * 65536 + count, mask=is_part)
            tl.store(part_ptr + 2, start, mask=is_part)
            tl.store(part_ptr + 3, end, mask=is_part)
            start = end
            part_ptr += 4
        before += tl.sum(count, axis=0)
    for first in range(before, num_parts, MANY_ROWS):
        tl.store(parts_ptr + 4 * (first + many), -1, mask=first + many < num_parts)


@precompile.jit(
    do_not_specialize=["num_rows", "num_shared_splits"],
    do_not_specialize_on_alignment=["query_start_ptr", "table_ptr"],
)
def attend_shared(
    q_ptr,
    k_ptr,
    v_ptr,
    partial_ptr,
    lse_ptr,
    found_ptr,
    query_start_ptr,
    table_ptr,
    num_rows,
    num_shared_splits,
    log2_scale,
    q_stride_t,
    q_stride_h,
    stride_b,
    stride_s,
    stride_h,
    v_stride_s,
    v_stride_h,
    table_stride,
    G: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend to the shared keys. Grid (splits, KV heads, tiles of rows).

    A tile holds the query heads of one KV head from many rows, so each key is loaded once per tile. Returns at once
    if nothing is shared. Splits beyond the shared keys are not written. PDL: see `attend`.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    shared = tl.load(found_ptr)
    if shared > 0:
        split = tl.program_id(0)
        kv_head = tl.program_id(1)
        lead = tl.load(found_ptr + 1)
        member = tl.arange(0, BLOCK_M)
        row = tl.program_id(2) * (BLOCK_M // G) + member // G
        head = kv_head * G + member % G
        inside = (member < BLOCK_M // G * G) & (row < num_rows)
        used = inside & (tl.load(found_ptr + 2 + row, mask=inside, other=0) > 0)
        slot = (row * (G * K) + head).to(tl.int64) * num_shared_splits + split
        share = keys_per_split(shared, num_shared_splits, 0, BLOCK_N)
        start = split * share
        stop = tl.minimum(shared, start + share)
        is_needed = (
            tl.max(used.to(tl.int32), axis=0) > 0
        )  # skip tiles of rows without the shared keys
        if (start < stop) & is_needed:
            token = tl.load(query_start_ptr + row, mask=inside, other=0).to(tl.int64)
            column = tl.arange(0, BLOCK_D)
            q_ptrs = q_ptr + token * q_stride_t + head * q_stride_h
            q = tl.load(
                q_ptrs[:, None] + column[None, :],
                mask=inside[:, None] & (column < D)[None, :],
                other=0.0,
            )
            q = fit_keys(q, k_ptr.dtype.element_ty)
            acc = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
            highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
            total = tl.zeros([BLOCK_M], dtype=tl.float32)
            acc, highest, total = attend_keys(
                acc,
                highest,
                total,
                q,
                row,
                row,
                start,
                stop,
                k_ptr + kv_head * stride_h,
                v_ptr + kv_head * (stride_h if V == D else v_stride_h),
                table_ptr + lead.to(tl.int64) * table_stride,
                stride_b,
                stride_s,
                v_stride_s,
                0,
                log2_scale,
                D,
                BLOCK_D,
                V,
                BLOCK_V,
                BLOCK_SIZE,
                BLOCK_N,
                False,
                False,
                False,
                SOFT_CAP,
                PRECISION,
            )
            acc = acc / total[:, None]
            v_column = tl.arange(0, BLOCK_V)
            mask = used[:, None] & (v_column < V)[None, :]
            tl.store(partial_ptr + slot[:, None] * BLOCK_V + v_column[None, :], acc, mask=mask)
            tl.store(lse_ptr + slot, highest + tl.log2(total), mask=used)
