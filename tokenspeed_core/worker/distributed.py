"""Connects the processes of an engine through torch.distributed and its groups."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tokenspeed_core.api.parallel import ParallelLayout
from tokenspeed_core.api.step import StepFailed
from tokenspeed_core.errors import ConfigError

# A kernel that one rank compiles, or a weight that it reads, may keep the others waiting.
_TIMEOUT = timedelta(minutes=30)

_ON_ABORT: list[Callable[[], None]] = []
_IS_ABORTED = threading.Event()
_GROUPS: list[Any] = []  # of this process

CommGroup = Any
"""A process group of torch.distributed."""


def free_address(address: str) -> str:
    """Return a rendezvous address: for `tcp://HOST` with a free port, for a file unchanged."""
    if not address.startswith("tcp://"):
        return address
    host = address.removeprefix("tcp://")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind(("", 0))
        return f"{address}:{probe.getsockname()[1]}"


def init(layout: ParallelLayout, address: str, device: torch.device) -> Mapping[str, CommGroup]:
    """Connect to the other ranks. Returns the handles of the groups with more than one member, by name.

    `address` is `file://PATH` on one machine, else `tcp://HOST:PORT`. Raises ConfigError if this process uses
    torch.distributed already, and StepFailed if the ranks cannot connect.
    """
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed is already initialized in this process. Close the other LLM, or use AsyncLLM, which runs the "
            "engine in another process."
        )
    try:
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "nccl",
            store=_store(layout, address),
            rank=layout.rank,
            world_size=layout.world_size,
            timeout=_TIMEOUT,
            device_id=None if device.type == "cpu" else device,
        )
        # torch.distributed requires that every process creates every group. Groups of the same processes share one.
        everyone = [ranks for name in layout.groups for ranks in _partition(layout, name)]
        made = {ranks: _group(ranks, layout.world_size) for ranks in dict.fromkeys(everyone)}
    except RuntimeError as error:
        close()
        # Groups are named by a count, which includes the failed one. With other names than in other processes, the groups
        # of a next engine in this process would wait for each other forever.
        distributed_c10d._world.group_count = 0
        summary = str(error).partition("\n")[0]
        raise StepFailed(f"the processes cannot connect to each other: {summary}") from error
    own = (group for ranks, group in made.items() if layout.rank in ranks)
    _GROUPS.extend(dict.fromkeys((dist.group.WORLD, *own)))
    return {name: made[group.ranks] for name, group in layout.groups.items() if group.size > 1}


def on_abort(stop_waiting: Callable[[], None]) -> None:
    """Let `abort` call a function that makes a kernel stop waiting for another process."""
    _ON_ABORT.append(stop_waiting)
    if _IS_ABORTED.is_set():
        stop_waiting()


def close() -> None:
    """End the communication. Does nothing if it was not started."""
    _ON_ABORT.clear()
    _IS_ABORTED.clear()
    _GROUPS.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def abort() -> None:
    """Make collectives that wait for a lost rank end. Gloo notices by itself; kernels would wait forever."""
    _IS_ABORTED.set()
    for stop_waiting in _ON_ABORT:
        # In a thread, because the call may wait for the device, and the rest must not.
        threading.Thread(target=stop_waiting, name="stop-waiting", daemon=True).start()
    for group in _GROUPS:
        with suppress(RuntimeError, ValueError):  # `close` may have ended the group
            if dist.get_backend(group) == "nccl":
                group._get_backend(torch.device("cuda")).abort()


def _store(layout: ParallelLayout, address: str) -> Any:
    # Otherwise torch sets up multicast for shared memory, which we do not use and some machines cannot.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    kind, _, rest = address.partition("://")
    if kind == "file":
        # Otherwise gloo listens on the address of the host name, which other machines may reach.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # Otherwise a thread of torch's NCCL group reads the file every second. The file is deleted once all ranks are
        # connected, and torch waits for a missing file until the timeout, even at process exit.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        return dist.FileStore(str(Path(rest)), layout.world_size)  # type: ignore[attr-defined]
    host, _, port = rest.rpartition(":")
    return dist.TCPStore(  # type: ignore[attr-defined]
        host.strip("[]"), int(port), layout.world_size, is_master=layout.rank == 0, timeout=_TIMEOUT
    )


def _partition(layout: ParallelLayout, name: str) -> list[tuple[int, ...]]:
    """Return the members of all groups of that name, in the order of their first ranks."""
    names = ("attn", "dense", "moe", "experts", "data")
    sizes: dict[str, Any] = {name: layout.group(name).size for name in names}
    members = (
        ParallelLayout.of(rank, **sizes).group(name).ranks for rank in range(layout.world_size)
    )
    return [ranks for ranks in dict.fromkeys(members) if len(ranks) > 1]


def _group(ranks: tuple[int, ...], world_size: int) -> CommGroup:
    if len(ranks) == world_size:
        return dist.group.WORLD
    return dist.new_group(list(ranks))
