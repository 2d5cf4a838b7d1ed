"""The local runner's front: starting it (weights, a trial of the largest step, the arena's size, warm-up)."""

from __future__ import annotations

from collections.abc import Callable

import psutil

from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.runner.assemble import Assembly, assemble
from tokenspeed_core.runner.config import RunnerConfig
from tokenspeed_core.runner.execute import LocalRunner
from tokenspeed_core.runner.memory import pages_of_host
from tokenspeed_core.runner.platform import resolve_device
from tokenspeed_core.runner.weights import load_weights

__all__ = ["LocalRunner", "RunnerConfig", "build"]

Progress = Callable[[str, int, int], None]


def build(config: RunnerConfig, catalog: Catalog, progress: Progress) -> LocalRunner:
    """Build a runner that serves at once; `progress(what, done, total)` is called as it goes.

    Raises CheckpointError, SelectionError, ConfigError and CapacityError, each saying what to do.
    """
    device = resolve_device(config.device)
    assembly = assemble(config, catalog, device)
    load_weights(assembly.model, config.checkpoint_path, config.load_format, catalog, progress)
    return LocalRunner(assembly, _wanted_pages(assembly) or _host_pages(assembly))


def _wanted_pages(assembly: Assembly) -> int | None:
    """Return the pages that the user asked for, if they did."""
    config, pool = assembly.config, assembly.pool
    if config.max_total_tokens is not None:
        return pool.pages_of_tokens(config.max_total_tokens)
    if config.kv_cache_memory is not None:
        return pool.pages_of_bytes(config.kv_cache_memory, "--kv-cache-memory")
    return None


def _host_pages(assembly: Assembly) -> int:
    return pages_of_host(assembly.pool, int(psutil.virtual_memory().available))
