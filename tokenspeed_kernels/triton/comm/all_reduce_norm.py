"""One-shot all-reduce, residual addition, RMS norm and FP8 quantization in one kernel, through symmetric memory.

Each program has its own rows and its own signals, so programs do not wait for each other. A program copies its rows of
x to a buffer that all GPUs of the group can read, tells the same program of each process, waits for their signals, and
adds up the rows of all processes in the order of ranks.

The signal is the number of the call, which each program counts on the device: captured calls can replay. Two buffers
take turns. A program writes to a buffer again two calls later, after all processes have signaled the call between,
which they do after they have read the buffer.

The norm's output is rounded to the dtype before it is quantized, so that a separate kernel gives the same codes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor, distributed

from tokenspeed_core.api import CommGroup, Problem
from tokenspeed_kernels.symmetric_memory import allocate
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.norm.rms_norm import precompile_add_norm
from tokenspeed_kernels.triton.quantize.fp8_per_group import GROUP, quantize_groups
from tokenspeed_kernels.triton.quantize.fp8_per_token import normalized, quantize_row

# All programs run at the same time on any supported GPU.
NUM_PROGRAMS = 64


@triton.jit
def _store_row(
    y,
    y_ptr,
    scale_ptr,
    row,
    num_rows,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    VECTOR: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Store a float32 row y, which is zero beyond its end, unless it is beyond the last row.

    NUM_SCALES: 0 stores y in the dtype of `y_ptr`. 1 quantizes it with one scale, and more with one scale per group.
    VECTOR: values that a thread loads at once. With codes stored in the same layout, the sum of squares does not
    depend on NUM_SCALES.
    """
    end = tl.where(row < num_rows, N, 0)
    column = tl.arange(0, BLOCK_N)
    if NUM_SCALES == 0:
        tl.store(y_ptr + row * N + column, y.to(y_ptr.dtype.element_ty), mask=column < end)
    elif NUM_SCALES == 1:
        codes, scale = quantize_row(y)
        target = tl.multiple_of(y_ptr + row * N + column, VECTOR)
        tl.store(target, codes, mask=column < end)
        tl.store(scale_ptr + row, scale, mask=row < num_rows)
    else:
        group = tl.arange(0, BLOCK_N // GROUP)
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        codes, scale = quantize_groups(tl.reshape(y, (BLOCK_N // GROUP, GROUP)))
        target = tl.multiple_of(y_ptr + row * N + column, (1, VECTOR))
        tl.store(target, codes, mask=column < end)
        tl.store(scale_ptr + row * NUM_SCALES + group, scale, mask=group * GROUP < end)


@precompile.jit(do_not_specialize=["num_rows"])
def _all_reduce_add_rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    scale_ptr,
    buffers_ptr,
    signals_ptr,
    calls_ptr,
    num_rows,
    eps,
    x_stride,
    residual_stride,
    buffer_size,
    RANK: tl.constexpr,
    NUM_PROCESSES: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    PUBLISH: tl.constexpr,
    REDUCE: tl.constexpr,
):
    VECTOR: tl.constexpr = ALIGNMENT * 8 // x_ptr.dtype.element_ty.primitive_bitwidth
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK_N)
    call = tl.load(calls_ptr + program) + 1
    offset = (call % 2) * buffer_size
    if PUBLISH:
        own = tl.load(buffers_ptr + RANK).to(x_ptr.dtype) + offset
        for start in range(0, num_rows, NUM_PROGRAMS):
            row = program.to(tl.int64) + start
            mask = column < tl.where(row < num_rows, N, 0)
            x = tl.load(x_ptr + row * x_stride + column, mask=mask)
            tl.store(tl.multiple_of(own + row * N + column, ALIGNMENT), x, mask=mask)
        tl.debug_barrier()  # all threads have written
        for process in tl.static_range(NUM_PROCESSES):
            signals = tl.load(signals_ptr + process).to(calls_ptr.dtype)
            tl.atomic_xchg(
                signals + program * NUM_PROCESSES + RANK, call, sem="release", scope="sys"
            )
    if REDUCE:
        signals = tl.load(signals_ptr + RANK).to(calls_ptr.dtype) + program * NUM_PROCESSES
        for process in tl.static_range(NUM_PROCESSES):
            while tl.atomic_add(signals + process, 0, sem="acquire", scope="sys") < call:
                pass
        tl.debug_barrier()
        weight = tl.load(weight_ptr + column, mask=column < N, other=0.0)
        for start in range(0, num_rows, NUM_PROGRAMS):
            row = program.to(tl.int64) + start
            mask = column < tl.where(row < num_rows, N, 0)
            total = tl.zeros((BLOCK_N,), tl.float32)
            for process in tl.static_range(NUM_PROCESSES):
                theirs = tl.load(buffers_ptr + process).to(x_ptr.dtype) + offset
                source = tl.multiple_of(theirs + row * N + column, ALIGNMENT)
                # The first-level cache does not see the writes of other GPUs.
                part = tl.load(source, mask=mask, other=0.0, volatile=True)
                total += part.to(tl.float32)
            target = residual_ptr + row * residual_stride + column
            residual = tl.load(target, mask=mask, other=0.0)
            stored = (total.to(residual.dtype).to(tl.float32) + residual.to(tl.float32)).to(
                residual.dtype
            )
            tl.store(target, stored, mask=mask)
            wide = stored.to(tl.float32)
            y = normalized(stored, tl.sum(wide * wide, axis=0), weight, eps, N)
            _store_row(y, y_ptr, scale_ptr, row, num_rows, N, BLOCK_N, VECTOR, NUM_SCALES, GROUP)
        tl.store(calls_ptr + program, call)


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The memory of a group of processes, as one of them addresses it."""

    buffers: Tensor  # int64 [P]: addresses of each process's two buffers, aligned to 16 bytes
    signals: Tensor  # int64 [P]: addresses of their signals [NUM_PROGRAMS, P], int64, 0 at first
    calls: Tensor  # int64 [NUM_PROGRAMS]: calls of each program of this process
    buffer_size: int  # values of one buffer, a multiple of 16
    own: tuple[Tensor, ...] = ()  # keeps this process's buffers and signals alive


class _Launches:
    """The launch parameters of the kernel for one process. Rows have `num_scales` scales, 0: they are not quantized."""

    def __init__(
        self, problem: Problem, rank: int, memory: SharedMemory, num_scales: int = 0
    ) -> None:
        self._size, self._num_processes = problem["size"], problem["num_processes"]
        self.num_scales = num_scales
        self._rank, self._memory = rank, memory
        self._block = triton.next_power_of_2(self._size)
        # Bytes. Triton does not know that of addresses in memory, and would copy one value at a time.
        self._alignment = math.gcd(16, self._size * getattr(torch, problem["dtype"]).itemsize)
        self._num_warps = min(16, max(4, self._block // 512))

    def launch(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        y: Tensor,
        eps: float,
        scale: Tensor | None = None,
        *,
        publish: bool = True,
        reduce: bool = True,
    ) -> None:
        """Run the kernel, or one of its two phases. All processes must publish before one of them can reduce."""
        num_rows = x.shape[0]
        if num_rows == 0:
            return
        memory = self._memory
        _all_reduce_add_rms_norm[(min(num_rows, NUM_PROGRAMS),)](
            x,
            residual,
            weight,
            y,
            scale,
            memory.buffers,
            memory.signals,
            memory.calls,
            num_rows,
            eps,
            x.stride(0),
            residual.stride(0),
            memory.buffer_size,
            RANK=self._rank,
            NUM_PROCESSES=self._num_processes,
            NUM_PROGRAMS=NUM_PROGRAMS,
            N=self._size,
            BLOCK_N=self._block,
            ALIGNMENT=self._alignment,
            NUM_SCALES=self.num_scales,
            GROUP=GROUP,
            PUBLISH=publish,
            REDUCE=reduce,
            num_warps=self._num_warps,
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
        """Return the codes [T, N] and scales [T, num_scales] of what `FusedAllReduce` returns, and the residual."""
        y = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
        scale = x.new_empty((x.shape[0], self.num_scales), dtype=torch.float32)
        self.launch(x, residual, weight, y, eps, scale)
        return y, scale, residual


def num_buffer_values(problem: Problem) -> int:
    """Return the values of one buffer, padded so that the next one is aligned."""
    num_values: int = problem["max_num_tokens"] * problem["size"]
    return triton.cdiv(num_values, 16) * 16


def all_reduce_add_rms_norm(problem: Problem, group: CommGroup) -> FusedAllReduce:
    """Return `reduce(x [T, N], residual, weight, eps) -> (y, residual)`, which adds all x into `residual`.

    Raises RuntimeError in all processes if two of them cannot address each other's memory.
    """
    kernel = FusedAllReduce(problem, group.group.rank, _allocate(problem, group))
    precompile_add_norm(kernel, problem)
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
    return kernel


def _allocate(problem: Problem, group: CommGroup) -> SharedMemory:
    """Allocate the memory of a kernel in all processes."""
    buffer_size = num_buffer_values(problem)
    values = allocate(group, 2 * buffer_size, getattr(torch, problem["dtype"]))
    signals = allocate(group, NUM_PROGRAMS * group.group.size, torch.int64)
    signals.own.zero_()
    device = signals.own.device
    memory = SharedMemory(
        torch.tensor(values.addresses, dtype=torch.int64, device=device),
        torch.tensor(signals.addresses, dtype=torch.int64, device=device),
        torch.zeros(NUM_PROGRAMS, dtype=torch.int64, device=device),
        buffer_size,
        (values.own, signals.own),
    )
    torch.cuda.synchronize(device)
    distributed.barrier(group.handle, device_ids=[device.index])
    return memory
