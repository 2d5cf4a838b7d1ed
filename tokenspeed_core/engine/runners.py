"""Builds the runner of an engine: for one process, for several ranks, or for engines that share experts."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tokenspeed_core.api.step import Runner, StepFailed, StepSize
from tokenspeed_core.config.parallel_settings import LOCAL
from tokenspeed_core.engine.subprocesses import make_private_folder, remove_folder
from tokenspeed_core.errors import EngineDeadError
from tokenspeed_core.executor import DistributedRunner, Ranks
from tokenspeed_core.executor.lockstep import LockstepRunner, Peers, SharingRunner
from tokenspeed_core.executor.messages import Agreed, Rendezvous
from tokenspeed_core.executor.model_files import digest_models
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.resolved import Resolved

if TYPE_CHECKING:
    from tokenspeed_core.worker.local import LocalRunner, Progress

_FILE = "file://"
log = logging.getLogger("tokenspeed.engine")


def build_runner(
    resolved: Resolved,
    catalog: Catalog,
    progress: Progress,
    ranks: Ranks | None,
    peers: Peers | None,
) -> tuple[LocalRunner, Runner]:
    """Return the runner of this process, and the one that executes a step on all processes that take part.

    Raises the errors of `worker.local.build`, and EngineDeadError if a rank or another engine ends.
    """
    from tokenspeed_core.worker.local import build

    if ranks is None and peers is None:
        runner = build(resolved, catalog, progress)
        return runner, runner
    try:
        runner = _build_with_others(resolved, catalog, progress, ranks, peers)
    except StepFailed as error:
        lost = None if ranks is None else ranks.wait_for_lost_rank()
        raise EngineDeadError(lost or str(error)) from error
    executed: SharingRunner = runner if ranks is None else DistributedRunner(runner, ranks)
    return runner, executed if peers is None else _in_lockstep(runner, executed, peers)


def _build_with_others(
    resolved: Resolved,
    catalog: Catalog,
    progress: Progress,
    ranks: Ranks | None,
    peers: Peers | None,
) -> LocalRunner:
    """Build the runner of this process while the other ranks and engines build theirs. Raises StepFailed."""
    from tokenspeed_core.worker import distributed
    from tokenspeed_core.worker.local import build
    from tokenspeed_core.worker.platform import check_num_devices, resolve_rank_device

    config, sizes = resolved.config, resolved.config.parallel_sizes()
    if config.distributed_executor_backend == LOCAL:
        check_num_devices(config.device, sizes.num_per_node)
    device = resolve_rank_device(config.device, 0)
    if ranks is not None:
        ranks.wait_joined(digest_models(resolved, catalog))
    address = _rendezvous(ranks, peers)
    if ranks is not None:
        ranks.broadcast(Rendezvous(address))
        ranks.use(abort=distributed.abort, leave=distributed.close)
    try:
        handles = distributed.init(resolved.parallel, address, device)
        agree = int if ranks is None else partial(_agree, ranks)  # one process keeps its value
        runner = build(resolved, catalog, progress, handles=handles, agree=agree)
        log.info("%s", sizes.describe(has_experts=bool(runner.kernel_plan.find("moe"))))
        if ranks is not None:
            ranks.remove_folder()
        if peers is not None:
            peers.exchange(StepSize())  # all processes of all engines have connected
    finally:
        if peers is not None:
            remove_folder(Path(address.removeprefix(_FILE)).parent)
    return runner


def _rendezvous(ranks: Ranks | None, peers: Peers | None) -> str:
    """Return the address at which all processes meet. Raises StepFailed if another engine ended."""
    from tokenspeed_core.worker import distributed

    if peers is not None:
        folder = peers.share(lambda: str(make_private_folder(peers.folder)))
        return f"{_FILE}{folder}/rendezvous"
    assert ranks is not None, "one process meets no other"
    return distributed.free_address(ranks.rendezvous)


def _agree(ranks: Ranks, value: int) -> int:
    """Return the smallest of the values that the ranks offer, and send it to them. Raises EngineDeadError."""
    smallest = ranks.gather_min(value)
    ranks.broadcast(Agreed(smallest))
    return smallest


def _in_lockstep(runner: LocalRunner, executed: SharingRunner, peers: Peers) -> LockstepRunner:
    """Return a runner that executes the steps of `executed` together with the other engines."""
    from tokenspeed_core.worker import distributed

    return LockstepRunner(
        executed,
        peers,
        unused_slot=runner.resolved.limits.max_num_seqs,
        num_groups=len(runner.resolved.cache_groups),
        leave=distributed.close if executed is runner else None,
    )
