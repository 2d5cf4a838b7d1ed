"""Captured steps on the CPU: a graph is a list of stages, which a replay runs again on the same buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tokenspeed_core.worker import graphs
from tokenspeed_core.worker.execute import LocalRunner
from tokenspeed_core.worker.staged import BucketSize


@dataclass
class HostGraph:
    """Stages that run again in each replay."""

    stages: tuple[Callable[[Any], None], ...]
    bucket: Any

    def replay(self) -> None:
        for stage in self.stages:
            stage(self.bucket)


class HostRing:
    """One buffer, which nothing reads later."""

    def __init__(self, num_bytes: int) -> None:
        self.buffer = np.zeros(num_bytes, np.uint8)

    def take(self, num_bytes: int) -> tuple[torch.Tensor, np.ndarray[Any, Any], Any]:
        event = SimpleNamespace(record=lambda: None)
        return torch.from_numpy(self.buffer), self.buffer, event


def capture(
    runner: LocalRunner, sizes: Sequence[BucketSize], patch: pytest.MonkeyPatch
) -> list[BucketSize]:
    """Capture steps of these sizes. The result receives the size of each captured step that runs later."""
    patch.setattr(graphs, "PinnedRing", HostRing)
    patch.setattr(graphs, "_record", lambda pool, bucket, *stages: HostGraph(stages, bucket))
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    patch.setattr(torch.cuda, "synchronize", lambda: None)
    runner.capture(sizes, lambda done, total: None)
    assert runner._graphs is not None
    used: list[BucketSize] = []
    upload = runner._graphs._upload

    def note(bucket: Any, plan: Any) -> None:
        used.append(bucket.layout.size)
        upload(bucket, plan)

    patch.setattr(runner._graphs, "_upload", note)
    return used
