"""Resolves `--device`, and restricts processes to their devices."""

from __future__ import annotations

import os
from itertools import permutations

import torch

from tokenspeed_core.api.kernels import PlatformInfo
from tokenspeed_core.errors import ConfigError


def resolve_device(name: str) -> torch.device:
    """Return the device of `--device`; "auto" is CUDA where there is one. Raises ConfigError."""
    device = _named_device(name)
    if device.type == "cpu":
        return device
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"--device {name} does not exist: torch finds {torch.cuda.device_count()} CUDA devices, numbered from 0. "
            "Choose one of them."
        )
    return torch.device("cuda", index)


def _named_device(name: str) -> torch.device:
    """Return the device of `--device`, without an index if the name has none. Does not start the driver."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if name.partition(":")[0] != "cuda":
        raise ConfigError(f"--device {name} is not supported. Use auto, cpu, cuda or cuda:N.")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"--device {name}: torch {torch.__version__} finds no CUDA device. Use --device cpu."
        )
    return torch.device(name)


def resolve_rank_device(name: str, local_rank: int) -> torch.device:
    """Return the device of a process that shares its machine with others. Raises ConfigError."""
    device = resolve_device(name)
    if device.type == "cpu":
        return device
    check_num_devices(name, local_rank + 1)
    return torch.device("cuda", local_rank)


def check_num_devices(name: str, num_ranks: int, num_engines: int = 1) -> None:
    """Raise ConfigError if this machine has fewer devices than the processes of its engines. Does not start the driver.

    `num_ranks` is the number of processes of an engine on this machine.
    """
    needed = num_engines * num_ranks
    if needed == 1 or _named_device(name).type == "cpu":
        return
    if ":" in name:
        raise ConfigError(
            f"--device {name} names one device, and this machine runs {needed} processes. Use --device cuda, and "
            "choose devices with CUDA_VISIBLE_DEVICES."
        )
    found = torch.cuda.device_count()
    if found >= needed:
        return
    if num_engines > 1:
        raise ConfigError(
            f"--data-parallel-size {num_engines} needs {needed} CUDA devices, {num_ranks} for each engine; torch finds "
            f"{found}. Lower --data-parallel-size, or make more devices visible."
        )
    raise ConfigError(
        f"{needed} processes on this machine need {needed} CUDA devices; torch finds {found}. Lower "
        "--tensor-parallel-size, or use more nodes (--nnodes)."
    )


def take_devices(name: str, replica: int, num_replicas: int, num_ranks: int) -> None:
    """Make only the devices of a replica visible to this process and those that it starts.

    Call it before CUDA is used. Raises ConfigError.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = (
        "1"  # otherwise the driver starts, and reads the devices
    )
    check_num_devices(name, num_ranks, num_replicas)
    if _named_device(name).type == "cpu":  # naming the current device would start the driver
        return
    found = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(found)))
    own = visible.split(",")[replica * num_ranks : (replica + 1) * num_ranks]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    if torch.cuda.device_count() != num_ranks:  # the driver has read the variable already
        raise ConfigError(
            "the CUDA devices of an engine cannot be chosen, because torch finds no NVML. Start one server per device "
            "with CUDA_VISIBLE_DEVICES."
        )


def have_peer_access(num_devices: int) -> bool:
    """Return whether the first CUDA devices of this machine can address each other's memory.

    A plan for other machines may need more devices than there are. They are assumed to have access.
    """
    return torch.cuda.device_count() < num_devices or all(
        torch.cuda.can_device_access_peer(first, second)
        for first, second in permutations(range(num_devices), 2)
    )


def describe_device(device: torch.device) -> PlatformInfo:
    """Return the platform that kernels are selected for."""
    if device.type == "cpu":
        num_threads = torch.get_num_threads()
        threads = "1 thread" if num_threads == 1 else f"{num_threads} threads"
        return PlatformInfo("cpu", None, f"CPU ({threads})")
    major, minor = torch.cuda.get_device_capability(device)
    return PlatformInfo("cuda", (major, minor), torch.cuda.get_device_name(device))
