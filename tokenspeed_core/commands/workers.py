"""The worker process that executors start on each node."""

from __future__ import annotations

from tokenspeed_core.executor.worker_process import WorkerProcess

__all__ = ["WorkerProcess"]
