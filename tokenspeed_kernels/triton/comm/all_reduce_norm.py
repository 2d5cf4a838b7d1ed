"""All-reduce, residual addition, RMS norm and FP8 quantization of rows x [T, N] in one kernel.

Each process writes its rows to the memory of the others. Every process has one inbox for each other process. The values
are their own flags: a negative zero means empty. Inboxes are empty at first, and senders replace negative zeros by
zeros. The receiver polls a value until it is not empty, and then empties it; one thread does both. A row therefore
arrives after one transfer, without a fence or a separate flag.

Two inboxes take turns. A sender reuses an inbox two calls later. By then it has received a row of the call in between,
which the other process sends only after it has emptied the first inbox. Programs count their calls on the device, so
captured calls can replay. Each program has its own rows, and sends some ahead of those that it receives, so that
transfers and norms overlap. Rows are added up in rank order.

The norm's output is rounded to the dtype before it is quantized, so that a separate kernel gives the same codes.

Values as flags: Lamport, "Specifying concurrent program modules", 1983.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor, distributed

from tokenspeed_core.api import CommGroup, Problem
from tokenspeed_kernels.symmetric_memory import AbortFlag, allocate
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.comm.overlap import OverlappedAllReduce, overlapped
from tokenspeed_kernels.triton.comm.rows import store_row, tiling
from tokenspeed_kernels.triton.norm.rms_norm import precompile_add_norm
from tokenspeed_kernels.triton.pdl import supports_pdl
from tokenspeed_kernels.triton.quantize.fp8_per_group import GROUP
from tokenspeed_kernels.triton.quantize.fp8_per_token import normalized

# At most two per multiprocessor of an H100. Programs start in order, and wait only for programs of the same index.
NUM_PROGRAMS = 256
NUM_AHEAD = 4  # rows that a program sends before it receives the first


@triton.jit
def _without_negative_zeros(x, EMPTY: tl.constexpr, BITS: tl.constexpr):
    bits = x.to(BITS, bitcast=True)
    return tl.where(bits == EMPTY, 0, bits).to(x.dtype, bitcast=True)


@triton.jit
def _inbox(
    inboxes_ptr,
    receiver: tl.constexpr,
    sender: tl.constexpr,
    offset,
    inbox_size,
    NUM_PROCESSES: tl.constexpr,
    BITS: tl.constexpr,
):
    """Return the address of the receiver's inbox for a sender. A process has none for its own rows."""
    index: tl.constexpr = (sender - receiver - 1) % NUM_PROCESSES
    base = tl.load(inboxes_ptr + receiver).to(tl.pointer_type(BITS))
    return base + offset + index * inbox_size


@precompile.jit(do_not_specialize=["num_rows"])
def _all_reduce_add_rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    scale_ptr,
    inboxes_ptr,
    calls_ptr,
    aborted_ptr,
    num_rows,
    eps,
    x_stride,
    residual_stride,
    inbox_size,
    RANK: tl.constexpr,
    NUM_PROCESSES: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    NUM_AHEAD: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BITS: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    SEND: tl.constexpr,
    RECEIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: one program per row, at most NUM_PROGRAMS. A program processes every NUM_PROGRAMS-th row.

    BITS is the integer type with the size of a value. Tests in one process launch SEND and RECEIVE separately.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    EMPTY: tl.constexpr = -(1 << (BITS.primitive_bitwidth - 1))  # negative zero
    VECTOR: tl.constexpr = ALIGNMENT * 8 // x_ptr.dtype.element_ty.primitive_bitwidth
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_N)
    weight = tl.load(weight_ptr + column, mask=column < N, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    call = tl.load(calls_ptr + program) + 1
    inbox_size = inbox_size.to(tl.int64)
    offset = (call % 2) * inbox_size * (NUM_PROCESSES - 1)
    ahead = tl.minimum(NUM_AHEAD, (num_rows - 1) // NUM_PROGRAMS) * NUM_PROGRAMS
    for start in range(-ahead, num_rows, NUM_PROGRAMS):
        if SEND:
            row = program + start + ahead
            mask = column < tl.where(row < num_rows, N, 0)
            x = tl.load(x_ptr + row * x_stride + column, mask=mask)
            bits = _without_negative_zeros(x, EMPTY, BITS).to(BITS, bitcast=True)
            for other in tl.static_range(1, NUM_PROCESSES):
                inbox = _inbox(
                    inboxes_ptr,
                    (RANK + other) % NUM_PROCESSES,
                    RANK,
                    offset,
                    inbox_size,
                    NUM_PROCESSES,
                    BITS,
                )
                tl.store(tl.multiple_of(inbox + row * N + column, ALIGNMENT), bits, mask=mask)
        row = tl.where(start >= 0, program + start, num_rows)
        mask = column < tl.where(row < num_rows, N, 0)
        if RECEIVE:
            target = residual_ptr + row * residual_stride + column
            residual = tl.load(target, mask=mask, other=0.0)
            total = tl.zeros((BLOCK_N,), tl.float32)
            for process in tl.static_range(NUM_PROCESSES):
                if process == RANK:
                    part = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0)
                    part = _without_negative_zeros(part, EMPTY, BITS)
                else:
                    inbox = _inbox(
                        inboxes_ptr, RANK, process, offset, inbox_size, NUM_PROCESSES, BITS
                    )
                    source = tl.multiple_of(inbox + row * N + column, ALIGNMENT)
                    bits = tl.load(source, mask=mask, other=0, volatile=True)
                    is_aborted = tl.load(aborted_ptr, volatile=True)
                    while (tl.max((bits == EMPTY).to(tl.int32), axis=0) == 1) & (is_aborted == 0):
                        bits = tl.load(source, mask=mask, other=0, volatile=True)
                        is_aborted = tl.load(aborted_ptr, volatile=True)
                    tl.store(source, tl.full((BLOCK_N,), EMPTY, BITS), mask=mask)
                    part = bits.to(x_ptr.dtype.element_ty, bitcast=True)
                total += part.to(tl.float32)
            stored = (total.to(residual.dtype).to(tl.float32) + residual.to(tl.float32)).to(
                residual.dtype
            )
            tl.store(target, stored, mask=mask)
            wide = stored.to(tl.float32)
            y = normalized(stored, tl.sum(wide * wide, axis=0), weight, eps, N)
            store_row(y, y_ptr, scale_ptr, row, num_rows, N, BLOCK_N, VECTOR, NUM_SCALES, GROUP)
    if RECEIVE:
        tl.store(calls_ptr + program, call)


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The memory of a group of processes, as one of them addresses it."""

    inboxes: Tensor  # int64 [P]: addresses of each process's inboxes [2, P - 1, inbox_size], 16-byte aligned
    calls: Tensor  # int64 [NUM_PROGRAMS]: calls of each program of this process
    inbox_size: int  # values, a multiple of 16
    is_aborted: Tensor  # int32 [1]: 1 ends the waiting for other processes
    own: Tensor | None = None  # keeps this process's inboxes alive


class _Launches:
    """The launch parameters of the kernel for one process. Rows have `num_scales` scales; 0: no quantization."""

    def __init__(
        self, problem: Problem, rank: int, memory: SharedMemory, num_scales: int = 0
    ) -> None:
        self._size, self._num_processes = problem["size"], problem["num_processes"]
        self.num_scales = num_scales
        self._rank, self._memory = rank, memory
        self._block, self._num_warps = tiling(self._size)
        item_size = getattr(torch, problem["dtype"]).itemsize
        self._bits = tl.int32 if item_size == 4 else tl.int16
        # Bytes. Triton cannot infer the alignment of loaded addresses, and would copy one value at a time.
        self._alignment = math.gcd(16, self._size * item_size)
        self._pdl = supports_pdl()
        self.overlap: OverlappedAllReduce | None = None

    def launch(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        y: Tensor,
        eps: float,
        scale: Tensor | None = None,
        *,
        send: bool = True,
        receive: bool = True,
    ) -> None:
        """Run the kernel, or one of its two phases. All processes must send before one of them can receive."""
        num_rows = x.shape[0]
        if num_rows == 0:
            return
        _all_reduce_add_rms_norm[(min(num_rows, NUM_PROGRAMS),)](
            x,
            residual,
            weight,
            y,
            scale,
            self._memory.inboxes,
            self._memory.calls,
            self._memory.is_aborted,
            num_rows,
            eps,
            x.stride(0),
            residual.stride(0),
            self._memory.inbox_size,
            RANK=self._rank,
            NUM_PROCESSES=self._num_processes,
            NUM_PROGRAMS=NUM_PROGRAMS,
            NUM_AHEAD=NUM_AHEAD,
            N=self._size,
            BLOCK_N=self._block,
            ALIGNMENT=self._alignment,
            BITS=self._bits,
            NUM_SCALES=self.num_scales,
            GROUP=GROUP,
            SEND=send,
            RECEIVE=receive,
            PDL=self._pdl,
            num_warps=self._num_warps,
            launch_pdl=self._pdl,
        )


class FusedAllReduce(_Launches):
    """The kernel of one process for a norm that is not quantized."""

    def __call__(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return the RMS norm of the residual after the x [T, N] of all processes are added, and the residual."""
        y = x.new_empty(x.shape)
        self.launch(x, residual, weight, y, eps)
        return y, residual


class QuantizingAllReduce(_Launches):
    """The kernel of one process for a norm that is quantized to FP8 (e4m3)."""

    def __call__(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes [T, N] and scales [T, num_scales] of the norm of `FusedAllReduce`, and the residual."""
        y = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
        scale = x.new_empty((x.shape[0], self.num_scales), dtype=torch.float32)
        self.launch(x, residual, weight, y, eps, scale)
        return y, scale, residual


def num_inbox_values(problem: Problem) -> int:
    """Return the values of one inbox, padded so that the next one is aligned."""
    num_values: int = problem["max_num_tokens"] * problem["size"]
    return triton.cdiv(num_values, 16) * 16


def all_reduce_add_rms_norm(problem: Problem, group: CommGroup) -> FusedAllReduce:
    """Return `reduce(x [T, N], residual, weight, eps) -> (y, residual)`, which adds all x into `residual`.

    Raises RuntimeError in all processes if two of them cannot address each other's memory.
    """
    kernel = FusedAllReduce(problem, group.group.rank, _allocate(problem, group))
    precompile_add_norm(kernel, problem)
    kernel.overlap = overlapped(problem, group, 0)
    return kernel


def all_reduce_add_rms_norm_fp8(problem: Problem, group: CommGroup) -> QuantizingAllReduce:
    """Return `reduce(x [T, N], residual, weight, eps) -> (y float8_e4m3fn, scale [T, 1], residual)`.

    Raises as `all_reduce_add_rms_norm` does.
    """
    return _quantizing(problem, group, 1)


def all_reduce_add_rms_norm_fp8_groups(problem: Problem, group: CommGroup) -> QuantizingAllReduce:
    """Return `reduce(x [T, N], residual, weight, eps) -> (y float8_e4m3fn, scale [T, ceil(N / 128)], residual)`.

    Raises as `all_reduce_add_rms_norm` does.
    """
    return _quantizing(problem, group, triton.cdiv(problem["size"], GROUP))


def _quantizing(problem: Problem, group: CommGroup, num_scales: int) -> QuantizingAllReduce:
    memory = _allocate(problem, group)
    kernel = QuantizingAllReduce(problem, group.group.rank, memory, num_scales)
    precompile_add_norm(kernel, problem)
    kernel.overlap = overlapped(problem, group, num_scales)
    return kernel


def _allocate(problem: Problem, group: CommGroup) -> SharedMemory:
    """Allocate the memory of a kernel in all processes."""
    inbox_size = num_inbox_values(problem)
    dtype = getattr(torch, problem["dtype"])
    inboxes = allocate(group, 2 * (group.group.size - 1) * inbox_size, dtype)
    inboxes.own.fill_(-0.0)
    device = inboxes.own.device
    memory = SharedMemory(
        torch.tensor(inboxes.addresses, dtype=torch.int64, device=device),
        torch.zeros(NUM_PROGRAMS, dtype=torch.int64, device=device),
        inbox_size,
        AbortFlag(group).value,
        inboxes.own,
    )
    torch.cuda.synchronize(device)
    distributed.barrier(group.handle, device_ids=[device.index])
    return memory
