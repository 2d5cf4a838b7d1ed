"""Builds the runner of an engine: for one process, for several ranks, or for engines that share experts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from tokenspeed_core.api.step import Runner, StepFailed
from tokenspeed_core.config.parallel_settings import LOCAL
from tokenspeed_core.engine.subprocesses import make_private_folder, remove_folder
from tokenspeed_core.errors import EngineDeadError
from tokenspeed_core.executor import DistributedRunner, Ranks
from tokenspeed_core.executor.lockstep import LockstepRunner, Peers
from tokenspeed_core.executor.messages import Agreed, Rendezvous
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.resolved import Resolved

if TYPE_CHECKING:
    from tokenspeed_core.worker.local import LocalRunner, Progress

log = logging.getLogger("tokenspeed.engine")


def build_runner(
    resolved: Resolved,
    catalog: Catalog,
    progress: Progress,
    ranks: Ranks | None,
    peers: Peers | None,
) -> tuple[LocalRunner, Runner]:
    """Return the runner of this process, and the one that executes a step on all processes that take part."""
    from tokenspeed_core.worker.local import build

    if ranks is not None:
        runner = _build_with_ranks(resolved, catalog, progress, ranks)
        return runner, DistributedRunner(runner, ranks)
    if peers is not None:
        runner = _build_with_peers(resolved, catalog, progress, peers)
        return runner, _in_lockstep(runner, peers)
    runner = build(resolved, catalog, progress)
    return runner, runner


def _build_with_ranks(
    resolved: Resolved, catalog: Catalog, progress: Progress, ranks: Ranks
) -> LocalRunner:
    """Build the runner of rank 0 while the other ranks build theirs."""
    from tokenspeed_core.worker import distributed
    from tokenspeed_core.worker.local import build
    from tokenspeed_core.worker.platform import check_num_devices, resolve_rank_device

    config, sizes = resolved.config, resolved.config.parallel_sizes()
    if config.distributed_executor_backend == LOCAL:
        check_num_devices(config.device, sizes.num_per_node)
    device = resolve_rank_device(config.device, 0)
    log.info("%s", sizes)
    ranks.wait_joined()
    address = distributed.free_address(ranks.rendezvous)
    ranks.broadcast(Rendezvous(address))
    ranks.use(abort=distributed.abort, leave=distributed.close)
    handles = distributed.init(resolved.parallel, address, device)

    def agree(value: int) -> int:
        smallest = ranks.gather_min(value)
        ranks.broadcast(Agreed(smallest))
        return smallest

    runner = build(resolved, catalog, progress, handles=handles, agree=agree)
    ranks.remove_folder()
    return runner


def _build_with_peers(
    resolved: Resolved, catalog: Catalog, progress: Progress, peers: Peers
) -> LocalRunner:
    """Build the runner of an engine that shares experts, while the other engines build theirs."""
    from tokenspeed_core.worker import distributed
    from tokenspeed_core.worker.local import build
    from tokenspeed_core.worker.platform import resolve_rank_device

    device = resolve_rank_device(resolved.config.device, 0)
    log.info("%s", resolved.config.parallel_sizes())
    try:
        folder = Path(peers.share(lambda: str(make_private_folder())))
        handles = distributed.init(resolved.parallel, f"file://{folder}/rendezvous", device)
    except StepFailed as error:
        raise EngineDeadError(str(error)) from error
    runner = build(resolved, catalog, progress, handles=handles)
    remove_folder(folder)
    return runner


def _in_lockstep(runner: LocalRunner, peers: Peers) -> LockstepRunner:
    """Return a runner that executes its steps together with the other engines."""
    from tokenspeed_core.worker import distributed

    return LockstepRunner(
        runner,
        peers,
        unused_slot=runner.resolved.limits.max_num_seqs,
        num_groups=len(runner.resolved.cache_groups),
        leave=distributed.close,
    )
