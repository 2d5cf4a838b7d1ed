"""For commands that ask which kernels would run; imports what starts an engine."""

from __future__ import annotations

from tokenspeed_core.engine.dry_run import dry_run, plan_kernels
from tokenspeed_core.kernels.plan import KernelPlan, NothingFitsError, PlannedOp, Verdict

__all__ = ["KernelPlan", "NothingFitsError", "PlannedOp", "Verdict", "dry_run", "plan_kernels"]
