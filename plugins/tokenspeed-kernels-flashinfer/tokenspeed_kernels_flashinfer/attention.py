"""Paged attention with FlashInfer (Ye et al., 2025, arXiv:2501.01005), including cascade attention.

The library plans a step on the host from the rows' lengths, so `prepare` reads them back from the device. Plans live
in fixed buffers, so that a captured step replays with the current plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenspeed_core.api import AttentionLimits, AttentionProblem, AttentionStep
from tokenspeed_kernels_flashinfer.cascade import MIN_ROWS, shared_blocks
from tokenspeed_kernels_flashinfer.options import DEFAULTS, FlashInferOptions

MIN_WORKSPACE = 128 * 2**20  # bytes for partial results of split keys; the library's recommendation
MAX_WORKSPACE = 512 * 2**20  # bytes; keys of steps that would need more are not split
# Maximum number of elements per token over all heads: the merge kernel has one thread per 8 elements.
MAX_MERGED = 8192
FALLBACK_MULTIPROCESSORS = 8  # without a device

I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The rows of a step on the host: query starts, numbers of blocks, and keys in the last block of each.

    `first` is the index of the rows' first block in the block table.
    """

    query_start: I32
    num_blocks: I32
    last: I32
    first: int


class _Buffers:
    """Buffers at fixed addresses, shared by all plans of one kind; only one is in use at a time."""

    def __init__(
        self, num_rows: int, num_tokens: int, num_blocks: int, num_heads: int, device: torch.device
    ) -> None:
        self.query_start = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        self.block_start = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        self.last = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.blocks = torch.zeros(max(1, num_blocks), dtype=torch.int32, device=device)
        self.schedule = torch.zeros(
            schedule_bytes(num_rows, num_tokens, num_heads), dtype=torch.uint8, device=device
        )


def schedule_bytes(num_rows: int, num_tokens: int, num_heads: int) -> int:
    """Return an upper bound of the bytes that the library's schedule of a step needs.

    Six integers per head and query tile on Hopper; otherwise three per tile and a few per token.
    """
    return (
        24 * num_heads * (num_tokens // 128 + num_rows + 2)
        + 64 * (num_tokens + num_rows + 4096)
        + 65536
    )


class FlashInferAttention:
    """Attention for rows with equal query lengths ("decode") or any query lengths ("prefill").

    `prepare` synchronizes with the device once per step. Decode, and everything with an FP8 cache, runs on the
    library's `fa2` kernels, which split the keys of few rows. Prefill runs on the kernels that the library prefers for
    the device.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        limits: AttentionLimits,
        device: torch.device,
        options: FlashInferOptions,
    ) -> None:
        self._problem, self._device = problem, device
        self._make = import_module("flashinfer.prefill").BatchPrefillWithPagedKVCacheWrapper
        self._merge: Callable[..., None] = import_module("flashinfer.cascade").merge_state_in_place
        self._dtype = getattr(torch, problem.dtype)
        self._kv_dtype = getattr(torch, problem.kv_dtype)
        self._num_multiprocessors = _num_multiprocessors(device)
        # Prefill steps end with an extra row without keys, for padding tokens.
        self._has_padding_row = problem.phase == "prefill"
        num_rows = limits.max_num_rows + self._has_padding_row
        num_tokens = max(limits.max_num_tokens, limits.max_num_rows)
        wanted = self._partial_bytes(num_rows, num_rows, 1) if problem.phase == "decode" else 0
        size = min(max(wanted, MIN_WORKSPACE), MAX_WORKSPACE)
        self._partial = torch.zeros(size, dtype=torch.uint8, device=device)
        self._own = _Buffers(
            num_rows,
            num_tokens,
            limits.max_num_rows * limits.max_num_blocks,
            problem.num_heads,
            device,
        )
        self._can_share = (
            options.shared_prefix
            and problem.phase == "decode"
            and problem.window is None
            and limits.max_num_rows >= MIN_ROWS
            and problem.num_heads * problem.head_size <= MAX_MERGED
        )
        if self._can_share:
            heads = (num_rows, problem.num_heads)
            self._common = _Buffers(1, num_rows, limits.max_num_blocks, problem.num_heads, device)
            self._common_out = torch.empty(
                (*heads, problem.head_size), dtype=self._dtype, device=device
            )
            self._lse = torch.empty((2, *heads), dtype=torch.float32, device=device)
            self._has_common = torch.zeros(num_rows, dtype=torch.uint8, device=device)
        self._planned: dict[tuple[int, ...], tuple[Any, Any | None]] = {}
        self._now: tuple[Any, Any | None] | None = None
        self._num_tokens = 0

    def prepare(self, step: AttentionStep) -> None:
        """Read the step's lengths back and plan it. A step that may be captured has a separate plan."""
        num_rows = step.num_rows
        shares = self._can_share and step.max_num_query == 1 and num_rows >= MIN_ROWS
        lengths = [step.query_start[: num_rows + 1], step.seq_lens[:num_rows]]
        if shares:
            lengths.append(
                shared_blocks(
                    step.seq_lens[:num_rows], step.block_table[:num_rows], self._block_size
                )
            )
        read = torch.cat(lengths).cpu().numpy()
        starts, seq_lens = read[: num_rows + 1], read[num_rows + 1 : 2 * num_rows + 1]
        num_shared, lead = read[2 * num_rows + 1 :].tolist() if shares else (0, 0)
        own, common = self._now = self._plans(step, shares=shares)
        self._num_tokens = step.num_tokens
        rows = self._rows(starts, seq_lens, num_shared, step.num_tokens)
        self._plan(own, rows, step.block_table, step.max_num_query, is_causal=True)
        if common is not None:
            together = _Rows(
                starts[[0, num_rows]],
                np.array([num_shared], np.int32),
                np.array([self._block_size if num_shared else 0], np.int32),
                0,
            )
            self._plan(
                common, together, step.block_table[lead : lead + 1], num_rows, is_causal=False
            )
            if num_shared:
                self._has_common[:num_rows].copy_(step.seq_lens[:num_rows] > 0)
            else:
                self._has_common.zero_()

    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        """Attend. q, out [T, H, D]; caches [B, block_size, K, D], strided on B."""
        assert self._now is not None, "forward before prepare"
        assert out.is_contiguous(), "the library needs a contiguous output"
        own, common = self._now
        num = self._num_tokens
        q, out, caches = q[:num], out[:num], (k_cache, v_cache)
        if common is None:
            own.run(q, caches, out=out)
            return
        common_out, common_lse, lse = self._common_out[:num], self._lse[0, :num], self._lse[1, :num]
        common.run(q, caches, out=common_out, lse=common_lse, return_lse=True)
        own.run(q, caches, out=out, lse=lse, return_lse=True)
        self._merge(out, lse, common_out, common_lse, self._has_common[:num])

    @property
    def _block_size(self) -> int:
        return self._problem.block_size

    def _plans(self, step: AttentionStep, *, shares: bool) -> tuple[Any, Any | None]:
        """Return the library's wrappers for a step: for its rows, and for their shared prefix.

        A step without host-side lengths may be captured, so each size has its own wrappers at fixed addresses.
        """
        is_fixed = step.host_query_start is None
        key = (step.num_rows, step.num_tokens, step.max_num_query) if is_fixed else (shares,)
        if key not in self._planned:
            backend = "auto" if self._problem.phase == "prefill" else "fa2"
            own = self._wrapper(
                self._own, step.num_rows + self._has_padding_row, step.num_tokens, backend, is_fixed
            )
            common = (
                self._wrapper(self._common, 1, step.num_rows, "fa2", is_fixed) if shares else None
            )
            self._planned[key] = own, common
        return self._planned[key]

    def _wrapper(
        self, buffers: _Buffers, num_rows: int, num_tokens: int, backend: str, is_fixed: bool
    ) -> Any:
        places = {
            "qo_indptr_buf": buffers.query_start[: num_rows + 1],
            "paged_kv_indptr_buf": buffers.block_start[: num_rows + 1],
            "paged_kv_indices_buf": buffers.blocks,
            "paged_kv_last_page_len_buf": buffers.last[:num_rows],
        }
        made = self._make(
            self._partial,
            "NHD",
            use_cuda_graph=is_fixed,
            backend=backend,
            **(places if is_fixed else {}),
        )
        size = (
            schedule_bytes(num_rows, num_tokens, self._problem.num_heads)
            if is_fixed
            else len(buffers.schedule)
        )
        made.reset_workspace_buffer(self._partial, buffers.schedule[:size])
        # A captured step launches programs for more tiles than there are. If keys are not split, the surplus programs
        # run anyway and compute the tile that this buffer names: zeros mean the first tile of the first row.
        made._pin_memory_int_workspace_buffer.zero_()
        return made

    def _rows(self, starts: I32, seq_lens: I32, num_shared: int, num_tokens: int) -> _Rows:
        """Return the rows without their shared blocks; for prefill, append a row without keys for padding tokens."""
        size = self._block_size
        num_blocks = -(-seq_lens // size)
        last = seq_lens - (num_blocks - 1) * size
        last[num_blocks == 0] = 0
        num_blocks = np.maximum(num_blocks - num_shared, 0)
        if self._has_padding_row:
            starts = np.append(starts, np.int32(num_tokens))
            num_blocks, last = np.append(num_blocks, np.int32(0)), np.append(last, np.int32(0))
        return _Rows(starts, num_blocks, last, num_shared)

    def _plan(
        self, wrapper: Any, rows: _Rows, table: Tensor, max_num_query: int, *, is_causal: bool
    ) -> None:
        problem = self._problem
        block_start = np.zeros(len(rows.num_blocks) + 1, np.int32)
        np.cumsum(rows.num_blocks, out=block_start[1:])
        wrapper.plan(
            torch.from_numpy(rows.query_start),
            torch.from_numpy(block_start),
            self._listed(rows, block_start, table),
            torch.from_numpy(rows.last),
            problem.num_heads,
            problem.num_kv_heads,
            problem.head_size,
            problem.block_size,
            causal=is_causal,
            sm_scale=problem.scale,
            window_left=-1 if problem.window is None else problem.window - 1,
            logits_soft_cap=problem.soft_cap or 0.0,  # 0: no bound
            q_data_type=self._dtype,
            kv_data_type=self._kv_dtype,
            disable_split_kv=not self._can_split(
                len(rows.last), int(rows.query_start[-1]), max_num_query
            ),
        )

    def _listed(self, rows: _Rows, block_start: I32, table: Tensor) -> Tensor:
        """Return the rows' blocks in order, int32 [blocks], on the device."""
        total = int(block_start[-1])
        sent = torch.from_numpy(np.stack((rows.num_blocks, block_start[:-1] - rows.first))).to(
            self._device
        )
        row = torch.repeat_interleave(sent[0], output_size=total)
        column = torch.arange(total, dtype=torch.int32, device=self._device) - sent[1].index_select(
            0, row
        )
        return table[row, column]

    def _can_split(self, num_rows: int, num_tokens: int, max_num_query: int) -> bool:
        """Return whether keys may be split: the partial results must fit, and prompts must have few tiles.

        For a captured step the answer depends only on its size.
        """
        if self._partial_bytes(num_rows, num_tokens, max_num_query) > len(self._partial):
            return False
        return (
            self._problem.phase == "decode"
            or self._tiles(num_rows, num_tokens, max_num_query)[0] < self._num_wanted
        )

    def _partial_bytes(self, num_rows: int, num_tokens: int, max_num_query: int) -> int:
        """Return the bytes for a step's partial results: values and a log-sum-exp for every head and tile."""
        num_tiles, tile = self._tiles(num_rows, num_tokens, max_num_query)
        heads = self._problem.num_heads * max(num_tiles, self._num_wanted)
        return 4 * heads * tile * (self._problem.head_size + 1) + 1024

    def _tiles(self, num_rows: int, num_tokens: int, max_num_query: int) -> tuple[int, int]:
        """Return the largest number of query tiles of a step, and the rows (query tokens times heads) of a tile."""
        num_groups = self._problem.num_heads // self._problem.num_kv_heads
        packed = max_num_query * num_groups
        tile = 16 if packed <= 16 else 64 if packed <= 64 else 128
        return -(-num_tokens * num_groups // tile) + num_rows, tile

    @property
    def _num_wanted(self) -> int:
        """Tiles needed to fill the device."""
        return max(1, 2 * self._num_multiprocessors // self._problem.num_kv_heads)


def attention(
    problem: AttentionProblem,
    limits: AttentionLimits,
    device: torch.device,
    options: FlashInferOptions = DEFAULTS,
) -> FlashInferAttention:
    """Build the backend (an AttentionFactory). Raises ImportError if the library cannot be loaded."""
    if problem.num_heads % problem.num_kv_heads:
        raise ValueError(
            f"num_heads ({problem.num_heads}) is not a multiple of num_kv_heads ({problem.num_kv_heads})"
        )
    return FlashInferAttention(problem, limits, device, options)


def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return FALLBACK_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
