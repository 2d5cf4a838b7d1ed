"""Messages about kernels that the worker logs at start."""

from __future__ import annotations

import logging

import pytest
import torch

from tokenspeed_core.kernels.plan import KernelPlan, PlannedOp, Verdict
from tokenspeed_core.worker.local import _log_kernel_notices


def planned(op: str, **changes: object) -> PlannedOp:
    taken = Verdict("torch", "tokenspeed-kernels", True, ())
    other = Verdict("acme/fast", "acme", True, (), needs_name=True)
    return PlannedOp(op, op, (), (), "torch", "tokenspeed-kernels", "", (taken, other), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("device", "num_warnings"), [("cpu", 0), ("cuda", 1)])
def test_slow_reference_ops_on_a_gpu_are_reported(
    caplog: pytest.LogCaptureFixture, device: str, num_warnings: int
) -> None:
    plan = KernelPlan("", (planned("linear", is_reference=True), planned("rope")))
    with caplog.at_level(logging.INFO, logger="tokenspeed.worker"):
        _log_kernel_notices(plan, torch.device(device))
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(warnings) == num_warnings
    assert all("1 ops" in line and ": linear." in line for line in warnings)
    (notice,) = (each.getMessage() for each in caplog.records if each.levelname == "INFO")
    assert "--kernel-backend linear=acme/fast" in notice
