"""Engines with several processes: rank 0 sends plans, and executors start the other ranks.

`Ranks` is rank 0's view of the others. `DistributedRunner` executes a step on all of them. Each of the others runs
`tokenspeed_core.worker.process`.
"""

from __future__ import annotations

from tokenspeed_core.executor.ranks import Ranks, find_executor, start_ranks
from tokenspeed_core.executor.runner import DistributedRunner

__all__ = ["DistributedRunner", "Ranks", "find_executor", "start_ranks"]
