"""All-reduce through torch's symmetric memory: buffers of all GPUs of a node that each of them can address.

Small sums are one-shot: each process reads the summands of all others. Larger ones are two-shot: each process adds up
one part and writes it to all others. NCCL adds up the largest. Multicast is not used.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import _SymmetricMemory

from tokenspeed_core.api import CommGroup, Problem
from tokenspeed_kernels.reference import comm

MAX_ONE_SHOT_BYTES = 64 << 10
MAX_TWO_SHOT_BYTES = 16 << 20
_SUM = "sum"
_INSTEAD = (
    "Use NCCL instead: add --no-enable-allreduce-fusion, and remove symm from --kernel-backend."
)
_num_rendezvous = 0  # of this process, in all groups


def all_reduce(problem: Problem, group: CommGroup) -> Callable[[Tensor], Tensor]:
    """Return `reduce(x [T, N]) -> x`, which adds up the x of all processes in place.

    Raises RuntimeError in all processes if two of them cannot address each other's memory.
    """
    dtype = getattr(torch, problem["dtype"])
    max_one_shot, max_two_shot = (
        limit // dtype.itemsize for limit in (MAX_ONE_SHOT_BYTES, MAX_TWO_SHOT_BYTES)
    )
    buffer = allocate(group, max_two_shot, dtype).own
    name, reduce_large = group.handle.group_name, comm.all_reduce(problem, group)
    one_shot = torch.ops.symm_mem.one_shot_all_reduce_copy_out
    two_shot = torch.ops.symm_mem.two_shot_all_reduce_

    def reduce(x: Tensor) -> Tensor:
        num_values = x.numel()
        if num_values > max_two_shot:
            return reduce_large(x)
        x = x.contiguous()
        if x.storage_offset():  # torch's kernels read 16 bytes at once
            x = x.clone()
        flat, part = x.view(-1), buffer[:num_values]
        if num_values <= max_one_shot:
            one_shot(part, flat, _SUM, name, flat)
        else:
            part.copy_(flat)
            flat.copy_(two_shot(part, _SUM, name))
        return x

    return reduce


@dataclass(frozen=True, slots=True)
class SymmetricBuffer:
    """One buffer per process of a group: this process's own, and all of them, as this process addresses them."""

    own: Tensor
    all: tuple[Tensor, ...]
    addresses: tuple[int, ...]


def allocate(group: CommGroup, num_values: int, dtype: torch.dtype) -> SymmetricBuffer:
    """Return a buffer [num_values] on each process's GPU that all processes of the group can address.

    All processes of the group call it. Raises RuntimeError in each of them if two cannot address each other's memory.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    peers: list[tuple[str, int, int]] = [("", 0, 0)] * group.group.size
    distributed.all_gather_object(
        peers, (socket.gethostname(), device.index, _num_rendezvous), group=group.handle
    )
    check_peers([(node, index) for node, index, _ in peers], torch.cuda.can_device_access_peer)
    try:
        catch_up(max(count for *_, count in peers), device)
        own, handle = _rendezvous(num_values, dtype, device, group.handle)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise RuntimeError(
            f"torch cannot share memory between the GPUs: {reason}. {_INSTEAD}"
        ) from error
    buffers = (handle.get_buffer(rank, (num_values,), dtype) for rank in range(group.group.size))
    return SymmetricBuffer(own, tuple(buffers), tuple(handle.buffer_ptrs))


def catch_up(num_rendezvous: int, device: torch.device) -> None:
    """Rendezvous alone until this process has done so `num_rendezvous` times.

    torch numbers the rendezvous of a process, over all groups, and those of a group must have the same number. Processes
    have different counts if one of them has been in another engine before, as in a program that creates two.
    """
    if _num_rendezvous == num_rendezvous:
        return
    alone = distributed.new_group(
        [distributed.get_rank()], backend="gloo", use_local_synchronization=True
    )
    while _num_rendezvous < num_rendezvous:
        _rendezvous(1, torch.int32, device, alone)
    distributed.destroy_process_group(alone)


def _rendezvous(
    num_values: int, dtype: torch.dtype, device: torch.device, group: Any
) -> tuple[Tensor, _SymmetricMemory]:
    """Return a buffer [num_values] of this process, and torch's handle of the buffers of all processes."""
    global _num_rendezvous
    own = _SymmetricMemory.empty_strided_p2p((num_values,), (1,), dtype, device)
    handle = _SymmetricMemory.rendezvous(own, group.group_name)
    _num_rendezvous += 1
    return own, handle


class AbortFlag:
    """A number on this process's GPU that kernels poll while they wait for another process; 1 makes them stop."""

    def __init__(self, group: CommGroup) -> None:
        """Start with 0, and set it to 1 when the group is aborted because a process died."""
        self.value = torch.zeros(1, dtype=torch.int32, device="cuda")
        self._one = torch.ones(1, dtype=torch.int32).pin_memory()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        group.on_abort(self.set)

    def set(self) -> None:
        """Copy 1 to the GPU while kernels run there. May be called from any thread."""
        with torch.cuda.stream(self._stream):
            self.value.copy_(self._one, non_blocking=True)


def check_peers(places: list[tuple[str, int]], can_access: Callable[[int, int], bool]) -> None:
    """Raise RuntimeError if two processes, each on a GPU of a node, cannot address each other's memory.

    If each process sees one GPU only, all indices are equal, and torch raises RuntimeError itself.
    """
    nodes = sorted({node for node, _ in places})
    if len(nodes) > 1:
        raise RuntimeError(
            f"symmetric memory needs all processes on one node, found {', '.join(nodes)}. {_INSTEAD}"
        )
    for first, second in permutations(sorted({index for _, index in places}), 2):
        if not can_access(first, second):
            raise RuntimeError(f"GPU {first} has no peer access to GPU {second}. {_INSTEAD}")
