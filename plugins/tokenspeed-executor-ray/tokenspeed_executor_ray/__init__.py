"""Runs the processes of an engine on the nodes of a Ray cluster."""

from __future__ import annotations

from tokenspeed_core.api import ExecutorSpec

SPEC = ExecutorSpec("tokenspeed_executor_ray.executor:RayExecutor")
