"""Functions for commands that plan a start without loading weights. Importing it imports most of the engine."""

from __future__ import annotations

from tokenspeed_core.config.describe import as_written
from tokenspeed_core.engine.planning import StartPlan, plan_kernels, plan_start
from tokenspeed_core.kernels.installed import installed_ops
from tokenspeed_core.kernels.plan import KernelPlan, NothingFitsError, PlannedOp, Verdict
from tokenspeed_core.kernels.table import describe_collectives, kernel_table

__all__ = [
    "KernelPlan",
    "NothingFitsError",
    "PlannedOp",
    "StartPlan",
    "Verdict",
    "as_written",
    "describe_collectives",
    "installed_ops",
    "kernel_table",
    "plan_kernels",
    "plan_start",
]
