"""Launches of the kernels of `absorbed_kernel`, and the op `mla_decode`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.reference.cache import MIN_SHARING_ROWS
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.mla.absorbed_kernel import attend, attend_shared, merge
from tokenspeed_kernels.triton.pdl import supports_pdl
from tokenspeed_kernels.triton.shared_memory import shared_memory

WANTED = 2  # programs per multiprocessor that splitting aims at
MIN_SHARE = 128  # fewest entries per split
FEW_TILES, SHORT_SHARE = 16, 32  # for so few tiles, splits may have fewer entries
MAX_SPLITS = 64
MIN_SHARED_SPLITS, MAX_SHARED_SPLITS = 8, 16
PARTS = 8  # parts that a program merges at a time
LOG2_E = 1.4426950408889634
FALLBACK_MULTIPROCESSORS = 8  # under the interpreter, which has no device


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rows of a tile (query tokens times heads), entries per iteration, warps, pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# For up to 16 rows, and for more, which need Hopper's wider instructions.
FEW, MANY = Tiling(16, 32, 4, 2), Tiling(64, 32, 8, 2)
WIDE = Tiling(16, 16, 4, 1)  # for float32
SHARED = (Tiling(64, 64, 8, 2), MANY, FEW)  # for shared entries: the first that fits the device


class AbsorbedAttention:
    """Attends to entries with absorbed queries."""

    def __init__(
        self,
        problem: Problem,
        tiling: Tiling | None = None,
        shared_tiling: Tiling | None = None,
        num_shared_splits: int | None = None,
    ) -> None:
        """Choose what is not given. Splitting shared entries aims at one program per multiprocessor."""
        self._num_heads: int = problem["num_heads"]
        self._latent_size: int = problem["latent_size"]
        self._rope_size: int = problem["rope_size"]
        self._block_size: int = problem["block_size"]
        self._is_wide = problem["dtype"] == "float32"
        self._tiling = tiling
        self._num_shared_splits = num_shared_splits
        self._pdl = supports_pdl()
        self.num_multiprocessors, best_shared = FALLBACK_MULTIPROCESSORS, SHARED[0]
        memory = shared_memory()
        if memory is not None:
            self.num_multiprocessors = torch.cuda.get_device_properties().multi_processor_count
            size = sum(map(triton.next_power_of_2, (self._latent_size, self._rope_size)))
            best_shared = fitting_tiling(SHARED, memory, size, size)
        self._shared_tiling = shared_tiling or (WIDE if self._is_wide else best_shared)

    def decode(
        self,
        q: Tensor,
        cache: Tensor,
        table: Tensor,
        lengths: Tensor,
        max_len: int,
        scale: float,
        shared: Tensor | None = None,
    ) -> Tensor:
        """Return y [T, H, L] for one query per row. `shared` is the result of the op `find_shared_prefix`, or None."""
        tiling = self._tiling_for(self._num_heads)
        num_tiles = q.shape[0] * triton.cdiv(self._num_heads, tiling.block_m)
        max_splits = max(1, max_len // (SHORT_SHARE if num_tiles <= FEW_TILES else MIN_SHARE))
        y, _ = self._run(
            q,
            cache,
            None,
            lengths,
            table,
            scale,
            num_tiles,
            max_splits,
            tiling,
            shared,
            context=False,
        )
        return y

    def prefill(
        self,
        q: Tensor,
        cache: Tensor,
        query_start: Tensor,
        lengths: Tensor,
        table: Tensor,
        scale: float,
        *,
        context: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return y [T, H, L] for rows of any number of queries, zero after the last row.

        With `context`, queries see the entries before the step's own only, and the log-sum-exps [T, H] (base 2) are
        returned too.
        """
        tiling = self._tiling_for(q.shape[0] * self._num_heads)
        num_tiles = q.shape[0] * self._num_heads // tiling.block_m + lengths.shape[0]
        return self._run(
            q,
            cache,
            query_start,
            lengths,
            table,
            scale,
            num_tiles,
            MAX_SPLITS,
            tiling,
            None,
            context=context,
        )

    def _tiling_for(self, num_rows: int) -> Tiling:
        if self._tiling is not None:
            return self._tiling
        if self._is_wide:
            return WIDE
        return FEW if num_rows <= FEW.block_m else MANY

    def _run(
        self,
        q: Tensor,
        cache: Tensor,
        query_start: Tensor | None,
        lengths: Tensor,
        table: Tensor,
        scale: float,
        num_tiles: int,
        max_splits: int,
        tiling: Tiling,
        shared: Tensor | None,
        *,
        context: bool,
    ) -> tuple[Tensor, Tensor | None]:
        num_tokens = q.shape[0]
        shape = (num_tokens, self._num_heads, self._latent_size)
        wanted = WANTED * self.num_multiprocessors // max(num_tiles, 1)
        splits = max(1, min(wanted, max_splits, MAX_SPLITS))
        shared_splits = 0 if shared is None else self._shared_splits(num_tokens)
        parts = splits + shared_splits
        # Queries after the last row have no tile.
        is_padded = query_start is not None
        y = q.new_zeros(shape) if is_padded and parts == 1 else q.new_empty(shape)
        lse = part_lse = part = y  # if unused
        if num_tokens == 0:
            return y, q.new_empty(shape[:2], dtype=torch.float32) if context else None
        if parts > 1:
            part_lse = q.new_empty((*shape[:2], parts), dtype=torch.float32)
            if is_padded:
                part_lse.fill_(float("-inf"))
            part = q.new_empty((*shape[:2], parts, shape[2]), dtype=torch.float32)
        if context:
            lse = q.new_full(shape[:2], float("-inf"), dtype=torch.float32)
        sizes = {
            "L": self._latent_size,
            "BLOCK_L": max(16, triton.next_power_of_2(self._latent_size)),
        }
        entries = {
            "H": self._num_heads,
            "R": self._rope_size,
            "BLOCK_R": max(16, triton.next_power_of_2(self._rope_size)),
            "BLOCK_SIZE": self._block_size,
            "PRECISION": "ieee" if self._is_wide else "tf32",
            "PDL": self._pdl,
        }
        strides = (*q.stride()[:2], *cache.stride()[:2], table.stride(0))
        if shared is not None:
            other = self._shared_tiling
            attend_shared[
                (shared_splits, triton.cdiv(num_tokens * self._num_heads, other.block_m))
            ](
                q,
                cache,
                part,
                part_lse,
                shared,
                lengths,
                table,
                num_tokens,
                splits,
                parts,
                scale * LOG2_E,
                *strides,
                BLOCK_M=other.block_m,
                BLOCK_N=other.block_n,
                **entries,
                **sizes,
                num_warps=other.num_warps,
                num_stages=other.num_stages,
                launch_pdl=self._pdl,
            )
        attend[(num_tiles, splits)](
            q,
            cache,
            part if parts > 1 else y,
            part_lse if parts > 1 else lse,
            lengths if shared is None else shared,
            lengths if query_start is None else query_start,
            lengths,
            table,
            lengths.shape[0],
            splits,
            parts,
            SHORT_SHARE if num_tiles <= FEW_TILES else MIN_SHARE,
            scale * LOG2_E,
            *strides,
            BLOCK_M=tiling.block_m,
            BLOCK_N=tiling.block_n,
            ONE_QUERY=query_start is None,
            CONTEXT=context,
            SHARED=shared is not None,
            HAS_LSE=parts > 1 or context,
            **entries,
            **sizes,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
            launch_pdl=self._pdl,
        )
        if parts > 1:
            merge[(num_tokens * self._num_heads,)](
                part,
                part_lse,
                y,
                lse,
                lengths if shared is None else shared,
                splits,
                shared_splits,
                SPLITS=MAX_SPLITS,
                PARTS=PARTS,
                SHARED=shared is not None,
                HAS_LSE=context,
                PDL=self._pdl,
                **sizes,
                num_warps=4,
                launch_pdl=self._pdl,
            )
        return y, lse if context else None

    def _shared_splits(self, num_rows: int) -> int:
        if self._num_shared_splits is not None:
            return self._num_shared_splits
        num_tiles = triton.cdiv(num_rows * self._num_heads, self._shared_tiling.block_m)
        splits = self.num_multiprocessors // max(num_tiles, 1)
        return max(MIN_SHARED_SPLITS, min(splits, MAX_SHARED_SPLITS))


def fitting_tiling(
    tilings: tuple[Tiling, ...], shared_memory: int, query_size: int, entry_size: int
) -> Tiling:
    """Return the first tiling with queries and entries of 16 bits in `shared_memory` bytes, or the last one.

    The sizes are values of a query, and values of an entry that an iteration loads.
    """
    for each in tilings:
        num_values = query_size * each.block_m + entry_size * each.num_stages * each.block_n
        if 2 * num_values <= shared_memory:
            return each
    return tilings[-1]


def mla_decode(problem: Problem) -> Callable[..., Tensor]:
    """Return `decode(q, cache, block_table, seq_lens, max_seq_len, scale, shared) -> y [T, H, L]`."""
    attention = AbsorbedAttention(problem)
    width, block_size = problem["latent_size"] + problem["rope_size"], problem["block_size"]
    cache = precompile.blank(problem["kv_dtype"], 2, 2, block_size, width)[:, 0]
    for num_rows, max_len, shared in (
        (1, 1, None),
        (1, MIN_SHARE * MAX_SPLITS, None),
        (MIN_SHARING_ROWS, 1, precompile.blank("int32", 2 + MIN_SHARING_ROWS)),
    ):
        precompile.compile_for(
            attention.decode,
            precompile.blank(problem["dtype"], num_rows, problem["num_heads"], width),
            cache,
            precompile.blank("int32", num_rows, 64),
            precompile.blank("int32", num_rows),
            max_len,
            1.0,
            shared,
        )
    return attention.decode
