"""The fused all-reduce of two processes, overlapped with the linear layer before it.

The layer computes its rows in two parts. A copy engine of the GPU sends the first part to the other process while the
layer computes the second one, and the second part while the norm of the first one runs. No multiprocessor takes part
in the transfers, which need only the link between the GPUs.

Each process has one inbox for the rows of the other one, and a flag for each part, which is sent after the part. Before
a process sends, both agree that their inboxes have been read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor, distributed
from triton import cdiv

from tokenspeed_core.api import CommGroup, Problem, SentSummands
from tokenspeed_kernels.symmetric_memory import AbortFlag, allocate
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.comm.rows import store_row, tiling
from tokenspeed_kernels.triton.quantize.fp8_per_group import GROUP
from tokenspeed_kernels.triton.quantize.fp8_per_token import normalized

MIN_NUM_TOKENS = 6144  # fewer rows gained nothing: two small GEMMs take longer than one
NUM_PARTS = 2
TILE_ROWS, TILE_FEATURES = 128, 256  # of a result, per multiprocessor of a large GEMM
# Computing a value from this many bytes of input takes about as long as sending it.
SENT_BYTES = 4000


@precompile.jit
def _meet(flags_ptr, other_flags_ptr, calls_ptr, aborted_ptr, NUM_PARTS: tl.constexpr):
    """Clear the flags of the parts, and wait until the other process has cleared its flags. Counters may wrap around."""
    for part in tl.static_range(NUM_PARTS):
        tl.store(flags_ptr + 1 + part, 0)
    call = tl.load(calls_ptr) + 1
    tl.store(calls_ptr, call)
    tl.debug_barrier()
    tl.atomic_add(other_flags_ptr, 1, sem="release", scope="sys")
    ready = tl.atomic_add(flags_ptr, 0, sem="acquire", scope="sys")
    while (ready - call < 0) & (tl.load(aborted_ptr, volatile=True) == 0):
        ready = tl.atomic_add(flags_ptr, 0, sem="acquire", scope="sys")


@precompile.jit
def _receive(
    own_ptr,
    inbox_ptr,
    arrived_ptr,
    aborted_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    scale_ptr,
    eps,
    residual_stride,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    VECTOR: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Wait for a part, add it to this process's and to the residual stream, and normalize. A program has one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_N)
    mask = column < N
    own = tl.load(own_ptr + row * N + column, mask=mask, other=0.0)
    target = residual_ptr + row * residual_stride + column
    residual = tl.load(target, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    has_arrived = tl.atomic_add(arrived_ptr, 0, sem="acquire", scope="sys")
    while (has_arrived == 0) & (tl.load(aborted_ptr, volatile=True) == 0):
        has_arrived = tl.atomic_add(arrived_ptr, 0, sem="acquire", scope="sys")
    other = tl.load(inbox_ptr + row * N + column, mask=mask, other=0.0)
    total = own.to(tl.float32) + other.to(tl.float32)
    stored = (total.to(residual.dtype).to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)
    tl.store(target, stored, mask=mask)
    wide = stored.to(tl.float32)
    y = normalized(stored, tl.sum(wide * wide, axis=0), weight, eps, N)
    store_row(y, y_ptr, scale_ptr, row, row + 1, N, BLOCK_N, VECTOR, NUM_SCALES, GROUP)


@lru_cache(maxsize=256)
def first_part(num_rows: int, size: int, num_bytes: int, num_multiprocessors: int) -> int:
    """Return the rows of the first part, a multiple of TILE_ROWS.

    A row has `size` values, computed from `num_bytes` bytes of input. Both parts together take as few waves of tiles as
    possible. Among these divisions, the first part is the largest that is sent before the second one is computed.
    """
    num_tiles = cdiv(num_rows, TILE_ROWS)
    per_row_of_tiles = cdiv(size, TILE_FEATURES)

    def waves(tiles: int) -> int:
        return cdiv(tiles * per_row_of_tiles, num_multiprocessors)

    both = {first: waves(first) + waves(num_tiles - first) for first in range(1, num_tiles)}
    fewest = min(both.values())
    best = [first for first, each in both.items() if each == fewest]
    largest = num_tiles * num_bytes / (num_bytes + SENT_BYTES)
    return TILE_ROWS * max((first for first in best if first <= largest), default=best[0])


@dataclass(frozen=True, slots=True)
class TwoInboxes:
    """The memory of two processes, as one of them addresses it.

    Flags are int32 [1 + parts]: how often the other process was ready, and whether each part has arrived.
    """

    inbox: Tensor  # [max_num_tokens, N]
    other_inbox: Tensor
    flags: Tensor
    other_flags: Tensor
    calls: Tensor  # int32 [1]: calls of this process
    is_aborted: Tensor  # int32 [1]: 1 ends the waiting for the other process


class OverlappedAllReduce:
    """Implements `Overlap` in a process of a pair. `num_scales` is that of the fused kernel."""

    def __init__(
        self,
        problem: Problem,
        memory: TwoInboxes,
        num_scales: int,
        transfers: torch.cuda.Stream,
        num_multiprocessors: int,
    ) -> None:
        """Send on the stream `transfers`."""
        self._size: int = problem["size"]
        self._memory, self._num_scales = memory, num_scales
        self._block, self._num_warps = tiling(self._size)
        item_size = getattr(torch, problem["dtype"]).itemsize
        self._vector = math.gcd(16, self._size * item_size) // item_size
        self._arrived = torch.ones_like(memory.flags[:1])
        self._transfers = transfers
        self._num_multiprocessors = num_multiprocessors
        self.min_num_tokens = MIN_NUM_TOKENS

    def send(self, compute: Callable[[Any], Tensor], x: Any) -> SentSummands:
        """Compute the summands of the rows x in two parts, and send each one at once (see `Overlap`)."""
        memory, transfers = self._memory, self._transfers
        inputs = x[0] if isinstance(x, tuple) else x
        num_rows = inputs.shape[0]
        num_bytes = inputs.shape[1:].numel() * inputs.itemsize
        middle = first_part(num_rows, self._size, num_bytes, self._num_multiprocessors)
        self.meet()
        parts = []
        for index, rows in enumerate((slice(0, middle), slice(middle, num_rows))):
            of_part = tuple(each[rows] for each in x) if isinstance(x, tuple) else x[rows]
            part = compute(of_part).contiguous()
            parts.append(part)
            transfers.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(transfers):
                memory.other_inbox[rows].copy_(part, non_blocking=True)
                memory.other_flags[1 + index : 2 + index].copy_(self._arrived, non_blocking=True)
        return SentSummands(tuple(parts))

    def meet(self) -> None:
        """Wait until both processes have read their inboxes."""
        memory = self._memory
        _meet[(1,)](
            memory.flags,
            memory.other_flags,
            memory.calls,
            memory.is_aborted,
            NUM_PARTS=NUM_PARTS,
            num_warps=1,
        )

    def receive(self, sent: SentSummands, residual: Tensor, weight: Tensor, eps: float) -> Any:
        """Return the norm, or its values and scales, and the residual, as the fused kernel does."""
        y, scale = self.outputs(residual)
        self.launch(sent.parts, residual, weight, y, scale, eps)
        # The parts may be freed only after they were sent.
        torch.cuda.current_stream().wait_stream(self._transfers)
        return (y, residual) if scale is None else (y, scale, residual)

    def launch(
        self,
        parts: tuple[Tensor, ...],
        residual: Tensor,
        weight: Tensor,
        y: Tensor,
        scale: Tensor | None,
        eps: float,
    ) -> None:
        """Run the kernel for each part, into y [T, N] and the scales [T, num_scales]."""
        memory, start = self._memory, 0
        for index, part in enumerate(parts):
            rows = slice(start, start + part.shape[0])
            start = rows.stop
            _receive[(part.shape[0],)](
                part,
                memory.inbox[rows],
                memory.flags[1 + index :],
                memory.is_aborted,
                residual[rows],
                weight,
                y[rows],
                None if scale is None else scale[rows],
                eps,
                residual.stride(0),
                N=self._size,
                BLOCK_N=self._block,
                VECTOR=self._vector,
                NUM_SCALES=self._num_scales,
                GROUP=GROUP,
                num_warps=self._num_warps,
            )

    def outputs(self, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return uninitialized results: the norm [T, N], or its values and scales [T, num_scales]."""
        if self._num_scales == 0:
            return residual.new_empty(residual.shape), None
        scale = residual.new_empty((residual.shape[0], self._num_scales), dtype=torch.float32)
        return residual.new_empty(residual.shape, dtype=torch.float8_e4m3fn), scale


def overlapped(problem: Problem, group: CommGroup, num_scales: int) -> OverlappedAllReduce | None:
    """Return the overlap of the fused kernel for a problem; None if it never runs.

    Both processes call it. Raises RuntimeError in both if they cannot address each other's memory.
    """
    if group.group.size != 2 or problem["max_num_tokens"] < MIN_NUM_TOKENS:
        return None
    dtype, other = getattr(torch, problem["dtype"]), 1 - group.group.rank
    shape = problem["max_num_tokens"], problem["size"]
    inboxes = allocate(group, shape[0] * shape[1], dtype)
    flags = allocate(group, 1 + NUM_PARTS, torch.int32)
    flags.own.zero_()
    memory = TwoInboxes(
        inboxes.own.view(shape),
        inboxes.all[other].view(shape),
        flags.own,
        flags.all[other],
        torch.zeros(1, dtype=torch.int32, device=flags.own.device),
        AbortFlag(group).value,
    )
    torch.cuda.synchronize(flags.own.device)
    distributed.barrier(group.handle, device_ids=[flags.own.device.index])
    transfers: torch.cuda.Stream = torch.cuda.Stream(flags.own.device)
    properties = torch.cuda.get_device_properties(flags.own.device)
    overlap = OverlappedAllReduce(
        problem, memory, num_scales, transfers, properties.multi_processor_count
    )
    _precompile(overlap, problem)
    return overlap


def _precompile(overlap: OverlappedAllReduce, problem: Problem) -> None:
    """Precompile the kernels."""
    blank = partial(precompile.blank, problem["dtype"])
    rows = blank(1, problem["size"])
    y, scale = overlap.outputs(rows)

    def launch() -> None:
        overlap.meet()
        overlap.launch((rows,), rows, blank(problem["size"]), y, scale, 0.0)

    precompile.compile_for(launch)
