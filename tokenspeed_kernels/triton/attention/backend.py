"""The Triton attention backend: split keys for decode rows, tiles of queries for prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate, product

import torch
import triton
from torch import Tensor

from tokenspeed_core.api import AttentionLimits, AttentionProblem, AttentionStep
from tokenspeed_kernels.options import DEFAULTS, MAX_SPLITS, AttentionOptions
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.attention.cascade import BLOCK_N as SHARED_BLOCK_N
from tokenspeed_kernels.triton.attention.cascade import MERGED_PARTS, SharedLaunch, SharedPrefix
from tokenspeed_kernels.triton.attention.kernel import attend
from tokenspeed_kernels.triton.attention.keys import LOG2_E, soft_cap
from tokenspeed_kernels.triton.attention.write_kv import blank_caches
from tokenspeed_kernels.triton.pdl import supports_pdl

# Minimum number of keys per split when there are many rows, so that only much longer rows are split.
LONG_SPLIT = 4096
# Programs per multiprocessor from which small tiles are fastest: while prefills run at the same time, and without them.
SOME_PER_SM, MANY_PER_SM = 3, 7
FULL = 2  # programs per multiprocessor that keep it busy
SPREAD = 1  # programs per multiprocessor, before splitting, up to which the queries of a row get several tiles
WANTED = 4  # programs per multiprocessor that splitting aims at
# With few KV heads, the keys that rows do not share are read fastest by larger and fewer programs.
FEW_KV_HEADS, WANTED_LARGE = 4, 3
NUM_SLOTS = {"decode": 65536, "prefill": 16384}  # rows of tiles over all splits, by phase
SMALL_STEP = 1024  # up to this many tokens, prompts get small tiles, so that there are enough tiles
# Rows of a decode tile, and of a wide tile; a row with more query tokens counts as a prompt.
MAX_DECODE_ROWS, MAX_WIDE_ROWS = 128, 64
FALLBACK_MULTIPROCESSORS = 8  # under the interpreter, which has no device


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of a program.

    A tile has `block_m` rows (query tokens times query heads of a KV head) and `block_n` keys per iteration. With too
    few rows to fill the device, keys are split into parts of at least `min_split`. A program merges the parts of
    `num_merged` rows at once. Up to `num_parts` parts are merged by one program, more by several.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    min_split: int = 64
    num_merged: int = 4
    num_parts: int = MERGED_PARTS


@dataclass(frozen=True, slots=True)
class _Launch:
    """Parameters of the launch over all rows of a step."""

    num_tiles: int
    num_row_tiles: int
    num_tokens: int  # query tokens of a tile
    num_splits: int
    min_split: int
    is_decode: bool
    tiling: Tiling
    shared: SharedLaunch | None

    @property
    def is_merged(self) -> bool:
        """Whether results of several programs may need merging."""
        return self.num_splits > 1 or self.shared is not None


class TritonAttention:
    """Paged attention for any mix of rows.

    `prepare` does host arithmetic only, so CUDA graphs may replay `forward`. In a decode launch, keys that all rows
    share are read once; the first layer of each forward finds how many there are.
    """

    prepares_on_host = True
    takes_drafts = True

    def __init__(
        self,
        problem: AttentionProblem,
        limits: AttentionLimits,
        device: torch.device,
        decode_tiling: Tiling | None = None,
        prefill_tiling: Tiling | None = None,
        options: AttentionOptions = DEFAULTS,
    ) -> None:
        if problem.num_heads % problem.num_kv_heads:
            raise ValueError(
                f"num_heads ({problem.num_heads}) is not a multiple of num_kv_heads ({problem.num_kv_heads})"
            )
        self._problem, self._options = problem, options
        self._num_groups = problem.num_heads // problem.num_kv_heads
        self._block_d, self._block_v = (
            max(16, triton.next_power_of_2(size)) for size in (problem.head_size, problem.out_size)
        )
        wide = problem.dtype == "float32" or max(self._block_d, self._block_v) > 128
        self._decode_few = decode_tiling or (Tiling(16, 32, 2, 2) if wide else Tiling(16, 64, 4, 2))
        self._decode = decode_tiling or (Tiling(16, 32, 2, 2) if wide else Tiling(16, 64, 2, 3))
        self._decode_many = decode_tiling or (
            Tiling(16, 32, 2, 2) if wide else Tiling(16, 32, 1, 3)
        )
        self._decode_overlapped = decode_tiling or (
            Tiling(16, 32, 2, 2) if wide else Tiling(16, 32, 2, 3)
        )
        has_few_kv_heads = problem.num_kv_heads <= FEW_KV_HEADS
        # Three programs fit on a multiprocessor, or two together with a program for the shared keys.
        self._decode_shared = decode_tiling or (
            Tiling(16, 32, 2, 2) if wide else Tiling(16, 64, 4 if has_few_kv_heads else 2, 2)
        )
        # With draft tokens, more rows are merged, so fewer parts. Few rows get tiles that are merged in one pass.
        self._spread = decode_tiling or (
            Tiling(16, 32, 2, 2, 128, 8, 16) if wide else Tiling(16, 64, 2, 3, 128, 8, 16)
        )
        self._drafts = decode_tiling or (
            Tiling(16, 32, 4, 2, 256, 8) if wide else Tiling(16, 64, 4, 3, 256, 16)
        )
        self._spread_tokens = max(1, self._spread.num_merged // self._num_groups)
        self._prefill = prefill_tiling or (Tiling(64, 32, 4, 2) if wide else Tiling(128, 128, 8, 3))
        self._small = prefill_tiling or (Tiling(64, 32, 4, 2) if wide else Tiling(64, 64, 4, 2))
        self._pdl = supports_pdl()
        self.num_multiprocessors = _num_multiprocessors(device)
        wanted = WANTED_LARGE if has_few_kv_heads and not wide else WANTED
        self._wanted_parts = wanted * self.num_multiprocessors // problem.num_kv_heads
        self._max_model_len = limits.max_model_len
        self._max_decode_rows = self._decode_rows(1)
        if problem.phase == "decode":
            self._max_decode_rows = MAX_WIDE_ROWS if wide else MAX_DECODE_ROWS
        num_slots = NUM_SLOTS[problem.phase]
        self._partial = torch.empty((num_slots, self._block_v), dtype=torch.float32, device=device)
        self._lse = torch.empty(num_slots, dtype=torch.float32, device=device)
        num_counts = max(
            limits.max_num_rows * problem.num_kv_heads * (MERGED_PARTS + 1),
            SPREAD * self.num_multiprocessors * (self._spread.num_parts + 1),
        )
        self._arrived = torch.zeros(num_counts, dtype=torch.int32, device=device)
        self.shared = SharedPrefix(problem, limits, device, self._block_d, self._block_v)
        self._first_layer: int | None = None  # the address of its keys
        self._launch: _Launch | None = None
        self._step: AttentionStep | None = None

    def prepare(self, step: AttentionStep) -> None:
        """Choose the launch parameters of a step from host-side numbers."""
        self._step = step
        self._first_layer = None
        is_decode = self._decode_rows(step.max_num_query) <= self._max_decode_rows
        self._launch = self._decode_launch(step) if is_decode else self._prefill_launch(step)

    def forward(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out: Tensor,
        sinks: Tensor | None = None,
    ) -> None:
        """Attend. q [T, H, D], out [T, H, V]; caches [B, block_size, K, D or V], strided on B alike; sinks float32 [H]."""
        assert k_cache.stride(0) == v_cache.stride(0), (
            "blocks of keys and values must be interleaved"
        )
        assert self._step is not None and self._launch is not None, "forward before prepare"
        if self._first_layer is None:
            self._first_layer = k_cache.data_ptr()
        shared = self._launch.shared
        # First: if no prefix is shared, this kernel returns immediately and overlaps with the next.
        if shared is not None:
            # Once per forward, in its first layer, so that a captured graph repeats the search.
            if k_cache.data_ptr() == self._first_layer:
                self.shared.find(self._step, shared, self._options.max_splits)
            self.shared.attend(self._step, shared, q, k_cache, v_cache)
        self._attend(self._step, self._launch, q, k_cache, v_cache, out, sinks)

    def _decode_launch(self, step: AttentionStep) -> _Launch:
        num_row_tiles, programs = 1, step.num_rows * self._problem.num_kv_heads
        block_m = self._decode_rows(step.max_num_query)
        num_tokens = block_m // self._num_groups
        spread = -(-step.max_num_query // self._spread_tokens)
        has_drafts = self._problem.phase == "decode" and step.max_num_query > 1
        is_spread = has_drafts and programs * spread <= SPREAD * self.num_multiprocessors
        if is_spread:
            num_row_tiles, num_tokens, programs = spread, self._spread_tokens, programs * spread
            block_m = self._decode_rows(num_tokens)
        room = self._lse.shape[0] // (programs * block_m)
        may_share = (
            self._options.shared_prefix and step.shares_prefix and step.max_num_query == 1 and room
        )
        shared = None
        if may_share:
            parts = self._lse.shape[0] // (self._problem.num_kv_heads * block_m)
            shared = self.shared.launch(step.num_rows, parts, self._wanted_parts)
        if is_spread:
            tiling = self._spread
        elif block_m == self._decode.block_m:
            tiling = self._decode_tiling(programs, step, is_shared=shared is not None)
        else:
            tiling = self._drafts_tiling(block_m)
        tiling = replace(tiling, block_m=block_m)
        if programs >= FULL * self.num_multiprocessors:
            # No more splits than the longest row needs: an empty split takes time too.
            min_split, splits = LONG_SPLIT, -(-step.max_seq_len // LONG_SPLIT)
        else:
            min_split, splits = tiling.min_split, WANTED * self.num_multiprocessors // programs
        max_splits = min(
            MAX_SPLITS, -(-self._max_model_len // min_split), room, self._options.max_splits
        )
        splits = max(1, min(splits, max_splits))
        if shared is not None:
            return _Launch(shared.num_parts, 1, num_tokens, 1, 0, True, tiling, shared)
        return _Launch(
            step.num_rows * num_row_tiles,
            num_row_tiles,
            num_tokens,
            splits,
            min_split,
            True,
            tiling,
            shared,
        )

    def _decode_tiling(self, programs: int, step: AttentionStep, *, is_shared: bool) -> Tiling:
        """Return the fastest measured tiling for this number of programs. The caller sets its rows."""
        programs_per_sm = programs // self.num_multiprocessors
        if programs_per_sm >= MANY_PER_SM:
            return self._decode_many
        if programs_per_sm < FULL:
            return self._decode_shared if is_shared else self._decode_few
        if not is_shared and step.overlaps_prefill and programs_per_sm >= SOME_PER_SM:
            return self._decode_overlapped
        return self._decode

    def _drafts_tiling(self, block_m: int) -> Tiling:
        """Return the tiling for rows with several query tokens. More than 64 rows of a tile need eight warps."""
        return replace(self._drafts, num_warps=8) if block_m > 64 else self._drafts

    def _prefill_launch(self, step: AttentionStep) -> _Launch:
        tiling = self._small if step.num_tokens <= SMALL_STEP else self._prefill
        num_tokens = tiling.block_m // self._num_groups
        num_tiles = step.num_tokens // num_tokens + step.num_rows
        return _Launch(num_tiles, 1, num_tokens, 1, 0, False, tiling, None)

    def _decode_rows(self, num_query: int) -> int:
        """Return the tile rows needed for all queries of a row."""
        return max(self._decode.block_m, triton.next_power_of_2(num_query * self._num_groups))

    def _attend(
        self,
        step: AttentionStep,
        launch: _Launch,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out: Tensor,
        sinks: Tensor | None,
    ) -> None:
        problem, tiling, shared = self._problem, launch.tiling, self.shared
        attend[(launch.num_tiles, problem.num_kv_heads, launch.num_splits)](
            q,
            k_cache,
            v_cache,
            out,
            self._partial,
            self._lse,
            self._arrived,
            shared.partial,
            shared.lse,
            shared.found,
            shared.parts,
            sinks,
            step.query_start,
            step.seq_lens,
            step.block_table,
            step.num_rows,
            launch.num_row_tiles,
            launch.num_splits,
            launch.shared.num_shared_splits if launch.shared else 0,
            launch.min_split,
            problem.window or 0,
            problem.scale * LOG2_E,
            q.stride(0),
            q.stride(1),
            out.stride(0),
            out.stride(1),
            *k_cache.stride()[:3],
            *v_cache.stride()[1:3],
            step.block_table.stride(0),
            G=self._num_groups,
            D=problem.head_size,
            BLOCK_D=self._block_d,
            V=problem.out_size,
            BLOCK_V=self._block_v,
            BLOCK_SIZE=problem.block_size,
            BLOCK_M=tiling.block_m,
            BLOCK_N=tiling.block_n,
            TOKENS=launch.num_tokens,
            SPLIT=launch.is_merged,
            IS_DECODE=launch.is_decode,
            HAS_WINDOW=problem.window is not None,
            IS_CHUNKED=problem.is_chunked,
            IS_BIDIRECTIONAL=problem.is_bidirectional,
            SOFT_CAP=soft_cap(problem),
            PRECISION="ieee" if problem.dtype == "float32" else "tf32",
            SHARED=launch.shared is not None,
            SHARED_BLOCK_N=SHARED_BLOCK_N,
            PDL=self._pdl,
            MEMBERS=tiling.num_merged,
            PARTS=tiling.num_parts,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
            launch_pdl=self._pdl,
        )


def attention(
    problem: AttentionProblem,
    limits: AttentionLimits,
    device: torch.device,
    options: AttentionOptions = DEFAULTS,
) -> TritonAttention:
    """Build the Triton backend (an AttentionFactory)."""
    backend = TritonAttention(problem, limits, device, options=options)
    precompile.compile_for(_attend_to_blanks, copy(backend), problem, limits)
    return backend


def _attend_to_blanks(
    backend: TritonAttention, problem: AttentionProblem, limits: AttentionLimits
) -> None:
    """Precompile every variant that a step can launch."""
    num_heads, num_kv_heads, size = problem.num_heads, problem.num_kv_heads, problem.head_size
    k_cache, v_cache = blank_caches(
        problem.kv_dtype, problem.block_size, num_kv_heads, size, problem.out_size
    )
    max_rows = min(limits.max_num_rows, limits.max_num_tokens)
    short = min(LONG_SPLIT, limits.max_model_len)
    bounds = ((True, limits.max_model_len), (False, short))
    edges = (
        -(-each * backend.num_multiprocessors // num_kv_heads)
        for each in (FULL, SOME_PER_SM, MANY_PER_SM)
    )
    some = sorted({min(num_rows, max_rows) for num_rows in (1, 2, 4, 8, 16, 17, *edges, max_rows)})
    sinks = precompile.blank("float32", num_heads) if problem.has_sinks else None
    steps = _num_queries(problem.phase, some, limits)
    for counts, (shares, longest), overlaps_prefill in product(steps, bounds, (False, True)):
        starts, num_rows = tuple(accumulate(counts, initial=0)), len(counts)
        q = precompile.blank(problem.dtype, starts[-1], num_heads + 2 * num_kv_heads, size)[
            :, :num_heads
        ]
        backend.prepare(
            AttentionStep(
                num_rows,
                starts[-1],
                max(counts),
                longest,
                precompile.blank("int32", num_rows + 1),
                precompile.blank("int32", num_rows),
                precompile.blank("int32", num_rows, limits.max_num_blocks),
                starts,
                None,
                shares,
                overlaps_prefill,
            )
        )
        out = q.new_empty((*q.shape[:2], problem.out_size))
        backend.forward(q, k_cache, v_cache, out, sinks)


def _num_queries(phase: str, some: Sequence[int], limits: AttentionLimits) -> Iterator[list[int]]:
    """Yield the query tokens per row of steps that need different variants."""
    num_queries = [1]
    if phase == "decode":
        # Powers of two reach all tiles.
        num_queries += [1 + drafts for drafts in (1, 2, 4, 8, 16, 32) if drafts < limits.max_drafts]
        num_queries += [1 + limits.max_drafts] if limits.max_drafts else []
    for num_query, num_rows in product(num_queries, some):
        yield [num_query] * num_rows
    if phase == "prefill":
        yield from (
            [min(num_tokens, limits.max_num_tokens)]
            for num_tokens in (SMALL_STEP, limits.max_num_tokens)
        )


def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return FALLBACK_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
