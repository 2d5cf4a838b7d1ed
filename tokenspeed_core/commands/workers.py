"""For executors: the worker process that they start on each node."""

from __future__ import annotations

from tokenspeed_core.executor.worker_process import WorkerProcess

__all__ = ["WorkerProcess"]
