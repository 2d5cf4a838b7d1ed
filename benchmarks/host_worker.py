"""A worker on the CPU with empty captured steps, to measure the host's part of a step."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from tokenspeed_core.config import Config
from tokenspeed_core.engine.factory import resolve
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.worker import graphs
from tokenspeed_core.worker.buckets import decode_sizes, draft_sizes
from tokenspeed_core.worker.execute import LocalRunner
from tokenspeed_core.worker.graph_recorder import GraphRecorder
from tokenspeed_core.worker.local import build
from tokenspeed_core.worker.staged import BucketSize

BLOCK_SIZE = 16
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


class EmptyGraph:
    """A graph that replays nothing."""

    def replay(self) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""


class EmptyRecorder(GraphRecorder):
    """Records nothing."""

    def __init__(self) -> None:
        """Need no device."""
        self._graphs: list[Any] = []

    def __call__(self, *stages: Callable[[], None]) -> Any:
        """Return an empty graph. The stages run once, because they set attributes of the captured step."""
        for stage in stages:
            stage()
        self._graphs.append(EmptyGraph())
        return self._graphs[-1]

    def synchronize(self) -> None:
        """Do nothing."""


class HostBuffer:
    """One buffer instead of a ring of pinned ones: no copy is in flight."""

    def __init__(self, num_bytes: int) -> None:
        """Allocate."""
        self._array = np.zeros(num_bytes, np.uint8)
        self._tensor = torch.from_numpy(self._array)
        self._event = SimpleNamespace(record=lambda: None)

    def take(self, num_bytes: int) -> tuple[torch.Tensor, np.ndarray[Any, Any], Any]:
        """Return the buffer."""
        return self._tensor, self._array, self._event


def captured_worker(
    num_rows: int, max_len: int, num_tokens: int, max_drafts: int, vocab_size: int
) -> LocalRunner:
    """Return a worker of a tiny model, with empty graphs of decode steps of up to `num_rows` rows."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPE | {"vocab_size": vocab_size}))
        settings: dict[str, Any] = {}
        if max_drafts:
            settings = {
                "speculative_algorithm": "suffix",
                "speculative_num_draft_tokens": 1 + max_drafts,
            }
        config = Config.from_keywords(
            model=folder,
            device="cpu",
            load_format="dummy",
            max_num_seqs=num_rows,
            max_model_len=max_len,
            max_total_tokens=num_tokens,
            block_size=BLOCK_SIZE,
            **settings,
        )
        catalog = Catalog.discover()
        runner = build(resolve(config, catalog), catalog, lambda what, done, total: None)
    decodes, limits = decode_sizes(num_rows, None, None), runner.resolved.limits
    sizes = [BucketSize(each, 0, 0) for each in decodes]
    sizes += draft_sizes(decodes, limits.max_drafts, limits.max_draft_tokens)
    with patch.multiple(graphs, PinnedRing=HostBuffer, GraphRecorder=EmptyRecorder):
        runner.capture(sizes, lambda done, total: None)
    return runner
