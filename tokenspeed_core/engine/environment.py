"""Sets up the CPU threads, devices and environment variables of this process, before a model is loaded."""

from __future__ import annotations

import os
from importlib.util import find_spec

from tokenspeed_core.config import Config
from tokenspeed_core.errors import ConfigError
from tokenspeed_core.resolved import Resolved

_GPU_SETTINGS = (
    "enforce_eager",
    "max_cudagraph_capture_size",
    "cudagraph_capture_sizes",
    "gpu_memory_utilization",
)


def threads_per_rank(config: Config, *, num_reserved: int) -> int:
    """Return the threads for a model on the CPU, leaving `num_reserved` cores to other processes."""
    # OMP_NUM_THREADS may be a list, with a number for each level of nesting.
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if given.isdecimal() and int(given):
        return int(given)
    num_free = len(os.sched_getaffinity(0)) - num_reserved
    return max(1, num_free // (config.parallel_sizes().num_per_node * config.data_parallel_size))


def take_devices(config: Config, replica: int) -> None:
    """Restrict this process and its ranks to the devices of engine `replica`. Raises ConfigError."""
    prepare_torch()
    from tokenspeed_core.worker.platform import take_devices

    num_ranks = config.parallel_sizes().num_per_node
    take_devices(config.device, replica, config.data_parallel_size, num_ranks)


def prepare_torch() -> None:
    """Set the environment that torch reads when it is imported. Raises ConfigError if it is not installed."""
    if find_spec("torch") is None:
        raise ConfigError("torch is not installed; run `pip install 'tokenspeed-core[default]'`")
    # By default idle OpenMP threads spin. On a CPU that another program shares, that makes a step several
    # times as long; on a dedicated one, sleeping costs about a tenth.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def unused_settings(resolved: Resolved, *, is_cpu: bool) -> dict[str, str]:
    """Return the settings that were given but have no effect here, with the reason."""
    config, reasons = resolved.config, dict[str, str]()
    if is_cpu:
        reasons = dict.fromkeys(_GPU_SETTINGS, "no effect on a CPU")
    if resolved.limits.whole_prompts:
        is_chunked, is_cached = config.chunked_prefill_size > 0, config.enable_prefix_caching
        for name, is_on in (
            ("chunked_prefill_size", is_chunked),
            ("enable_prefix_caching", is_cached),
        ):
            if is_on:
                reasons[name] = "no effect: the model's attention to prompts is bidirectional"
    elif config.chunked_prefill_size > 0:
        reasons["max_prefill_tokens"] = "no effect unless --chunked-prefill-size is -1"
    return {name: why for name, why in reasons.items() if config.origin(name) != "default"}
