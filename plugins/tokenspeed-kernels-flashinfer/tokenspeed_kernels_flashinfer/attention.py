"""Paged attention by FlashInfer (Ye et al. 2025, arXiv:2501.01005): rows of any length, shared prefixes read once.

The library plans a step on the host, from the rows' lengths, so `prepare` reads these back from the device. A plan is
kept in memory that stays, so that a captured step replays with the plan of that time.
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

MIN_WORKSPACE = 128 * 2**20  # bytes, what the library recommends, for results of keys in parts
MAX_WORKSPACE = 512 * 2**20  # steps whose parts need more are not cut
MAX_MERGED = 8192  # elements of all heads of a token: a program of the library's merging has a thread for eight
FALLBACK_MULTIPROCESSORS = 8  # where there is no device

I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The rows of a step on the host: where their query tokens start, their blocks, and keys in the last of these.

    `first` is the first block of each, in its row of the block table.
    """

    query_start: I32
    num_blocks: I32
    last: I32
    first: int


class _Buffers:
    """Memory at fixed addresses for all plans of one kind, since only one is in use at a time."""

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
    """Return how much memory the library's schedule of a step takes at most.

    Six numbers for each head and tile of queries on Hopper, else three for each tile and a few for each token.
    """
    return (
        24 * num_heads * (num_tokens // 128 + num_rows + 2)
        + 64 * (num_tokens + num_rows + 4096)
        + 65536
    )


class FlashInferAttention:
    """Attention for rows of one length ("decode") or of any lengths ("prefill").

    `prepare` waits for the device, once a step. Decodes, and all with a cache in eight bits, run on the library's
    `fa2` kernels, for which keys of few rows are cut into parts; prompts run on those that it prefers for the device.
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
        self._dtype, self._kv_dtype = (
            getattr(torch, problem.dtype),
            getattr(torch, problem.kv_dtype),
        )
        self._num_multiprocessors = _num_multiprocessors(device)
        self._closes = problem.phase == "prefill"
        num_rows, num_tokens = (
            limits.max_num_rows + self._closes,
            max(limits.max_num_tokens, limits.max_num_rows),
        )
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
        """Read the step's lengths back and plan it, in a graph's own plan where the host does not know them."""
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
        """Attend. q, out [T, H, D]; caches [B, block_size, K, D], strided on B, both alike."""
        assert self._now is not None, "forward before prepare"
        assert out.is_contiguous(), "the library writes results one after another"
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
        """Return what plans and runs a step: for its rows, and for what these share.

        A step whose lengths the host does not know may be captured: each size of it has its own, at fixed addresses.
        """
        is_fixed = step.host_query_start is None
        key = (step.num_rows, step.num_tokens, step.max_num_query) if is_fixed else (shares,)
        if key not in self._planned:
            backend = "auto" if self._problem.phase == "prefill" else "fa2"
            own = self._wrapper(
                self._own, step.num_rows + self._closes, step.num_tokens, backend, is_fixed
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
        # A captured step has programs for more tiles than there are. Where keys are not cut the library does not stop
        # these, and they compute whatever tile this memory names: the first one of the first row, not nonsense.
        made._pin_memory_int_workspace_buffer.zero_()
        return made

    def _rows(self, starts: I32, seq_lens: I32, num_shared: int, num_tokens: int) -> _Rows:
        """Return the rows without their shared blocks, and behind prompts one without keys, of the padding tokens."""
        size = self._block_size
        num_blocks = -(-seq_lens // size)
        last = seq_lens - (num_blocks - 1) * size
        last[num_blocks == 0] = 0
        num_blocks = np.maximum(num_blocks - num_shared, 0)
        if self._closes:
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
            q_data_type=self._dtype,
            kv_data_type=self._kv_dtype,
            disable_split_kv=not self._can_split(
                len(rows.last), int(rows.query_start[-1]), max_num_query
            ),
        )

    def _listed(self, rows: _Rows, block_start: I32, table: Tensor) -> Tensor:
        """Return int32 [blocks]: the rows' blocks one after another, on the device."""
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
        """Say whether keys may be cut into parts, where their results find room. Of prompts only where tiles are few.

        For a captured step the answer depends on its size alone.
        """
        if self._partial_bytes(num_rows, num_tokens, max_num_query) > len(self._partial):
            return False
        return (
            self._problem.phase == "decode"
            or self._tiles(num_rows, num_tokens, max_num_query)[0] < self._num_wanted
        )

    def _partial_bytes(self, num_rows: int, num_tokens: int, max_num_query: int) -> int:
        """Return what the library takes for a step's results of parts: values and a weight of every head and tile."""
        num_tiles, tile = self._tiles(num_rows, num_tokens, max_num_query)
        heads = self._problem.num_heads * max(num_tiles, self._num_wanted)
        return 4 * heads * tile * (self._problem.head_size + 1) + 1024

    def _tiles(self, num_rows: int, num_tokens: int, max_num_query: int) -> tuple[int, int]:
        """Return how many tiles of queries a step has at most, and how many query tokens times heads fit in one."""
        num_groups = self._problem.num_heads // self._problem.num_kv_heads
        packed = max_num_query * num_groups
        tile = 16 if packed <= 16 else 64 if packed <= 64 else 128
        return -(-num_tokens * num_groups // tile) + num_rows, tile

    @property
    def _num_wanted(self) -> int:
        """Tiles with which the library fills the device."""
        return max(1, 2 * self._num_multiprocessors // self._problem.num_kv_heads)


def attention(
    problem: AttentionProblem,
    limits: AttentionLimits,
    device: torch.device,
    options: FlashInferOptions = DEFAULTS,
) -> FlashInferAttention:
    """Build the backend (an AttentionFactory). Raises ImportError where the library cannot be loaded."""
    if problem.num_heads % problem.num_kv_heads:
        raise ValueError(f"{problem.num_heads} query heads over {problem.num_kv_heads} key heads")
    return FlashInferAttention(problem, limits, device, options)


def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return FALLBACK_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
