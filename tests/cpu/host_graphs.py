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
from tokenspeed_core.worker.attention import AttentionGroup, Batch
from tokenspeed_core.worker.buckets import bucket_sizes, draft_sizes, followed_sizes
from tokenspeed_core.worker.execute import LocalRunner
from tokenspeed_core.worker.graph_recorder import GraphRecorder
from tokenspeed_core.worker.staged import BucketSize


@dataclass
class HostGraph:
    """Stages that run again in each replay, with the attention inputs for which they were recorded."""

    stages: tuple[Callable[[], None], ...]
    prepared: list[tuple[AttentionGroup, torch.Tensor, list[Batch]]]
    is_reset: bool = False

    def reset(self) -> None:
        self.is_reset = True

    def replay(self) -> None:
        for group, kv_slots, batches in self.prepared:
            group.kv_slots, group.batches = kv_slots, batches
        for stage in self.stages:
            stage()


class HostRecorder(GraphRecorder):
    """Records stages instead of kernels, and runs them, because they set attributes of the bucket."""

    def __init__(self, groups: Sequence[AttentionGroup]) -> None:
        self.groups = groups
        self._graphs: list[Any] = []

    def __call__(self, *stages: Callable[[], None]) -> Any:
        prepared = [(each, each.kv_slots, each.batches) for each in self.groups]
        for stage in stages:
            stage()
        self._graphs.append(HostGraph(stages, prepared))
        return self._graphs[-1]

    def synchronize(self) -> None:
        """Do nothing."""


class HostRing:
    """One buffer, which nothing reads later."""

    def __init__(self, num_bytes: int) -> None:
        self.buffer = np.zeros(num_bytes, np.uint8)

    def take(self, num_bytes: int) -> tuple[torch.Tensor, np.ndarray[Any, Any], Any]:
        event = SimpleNamespace(record=lambda: None)
        return torch.from_numpy(self.buffer), self.buffer, event


def capture_decodes(
    runner: LocalRunner,
    num_rows: Sequence[int],
    patch: pytest.MonkeyPatch,
    *,
    with_prompts: bool = False,
) -> list[BucketSize]:
    """Capture decode steps of these numbers of rows, without and with draft tokens, as `capture` does.

    With prompts, also steps with up to 64 prompt tokens.
    """
    limits = runner.resolved.limits
    mixed = bucket_sizes(num_rows, 64, limits.max_num_seqs) if with_prompts else ()
    drafts = draft_sizes(num_rows, limits.max_drafts, limits.max_draft_tokens)
    patch.setattr(runner, "_graphs", None)  # restored with the patch
    decodes = [BucketSize(each, 0, 0) for each in num_rows]
    chunks = [size for size in mixed if size.num_chunks]
    has_draft_model = runner.resolved.draft_model is not None
    followed = followed_sizes(chunks, 1) if has_draft_model else ()
    return capture(runner, (*decodes, *chunks, *drafts, *followed), patch)


def capture(
    runner: LocalRunner, sizes: Sequence[BucketSize], patch: pytest.MonkeyPatch
) -> list[BucketSize]:
    """Capture steps of these sizes. The result receives the size of each captured step that runs later."""
    patch.setattr(graphs, "PinnedRing", HostRing)
    patch.setattr(graphs, "GraphRecorder", lambda: HostRecorder(runner._groups))
    runner.capture(sizes, lambda done, total: None)
    assert runner._graphs is not None
    used: list[BucketSize] = []
    upload = runner._graphs._upload

    def note(bucket: Any, plan: Any) -> bytes:
        used.append(bucket.layout.size)
        return upload(bucket, plan)

    patch.setattr(runner._graphs, "_upload", note)
    return used
