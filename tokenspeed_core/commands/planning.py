"""For commands that take the flags of `serve` and ask what would run with them; imports the configuration."""

from __future__ import annotations

from tokenspeed_core.cli.serve import ConfigFile, ModelArgument, configure
from tokenspeed_core.cli.settings import with_settings
from tokenspeed_core.engine.launch import plan_kernels
from tokenspeed_core.kernels.plan import KernelPlan, PlannedOp, Verdict

__all__ = [
    "ConfigFile", "KernelPlan", "ModelArgument", "PlannedOp", "Verdict", "configure", "plan_kernels", "with_settings",
]
