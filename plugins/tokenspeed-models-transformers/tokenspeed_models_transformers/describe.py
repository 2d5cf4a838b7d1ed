"""Describes a checkpoint for the core. Imports no tensor library.

A `config.json` may rely on defaults of a class of transformers, and these classes import torch. A process without torch
therefore asks a subprocess.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from tokenspeed_core.api import CacheGroupSpec, FullAttention, ModelInfo, SlidingWindow

Layer = tuple[int, int, int, int | None]
"""KV heads, the sizes of a key and a value head, and the window of an attention layer."""


def describe(config: Mapping[str, Any]) -> ModelInfo:
    """Describe a checkpoint that transformers can build. Raises ValueError with the reason for any other."""
    if "torch" in sys.modules:
        from tokenspeed_models_transformers.summary import summarize

        summary = summarize(config)
    else:
        summary = _ask_subprocess(config)
    layers: list[Layer] = [tuple(layer) for layer in summary.pop("layers")]
    return ModelInfo(
        **{**summary, "eos_token_ids": tuple(summary["eos_token_ids"])},
        num_layers=len(layers),
        cache_groups=cache_groups(layers),
    )


def group_name(layer: Layer) -> str:
    """Return the name of the cache group of a layer."""
    num_kv_heads, head_size, value_size, window = layer
    kind = "full" if window is None else f"window_{window}"
    values = "" if value_size == head_size else f"_values_{value_size}"
    return f"{kind}_{num_kv_heads}x{head_size}{values}"


def cache_groups(layers: Iterable[Layer]) -> tuple[CacheGroupSpec, ...]:
    """Return one group for all layers of the same shape and window."""
    groups: list[CacheGroupSpec] = []
    for layer, num_layers in Counter(layers).items():
        num_kv_heads, head_size, size, window = layer
        name, value_size = group_name(layer), None if size == head_size else size
        if window is None:
            groups.append(FullAttention(name, num_layers, num_kv_heads, head_size, value_size))
        else:
            groups.append(
                SlidingWindow(name, num_layers, num_kv_heads, head_size, window, value_size)
            )
    return tuple(groups)


def _ask_subprocess(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary of a configuration. Raises ValueError."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tokenspeed_models_transformers.summary"],
        input=json.dumps(config),
        capture_output=True,
        text=True,
        check=False,
    )
    # Code of a repository may print.
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        reason = (done.stderr.splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ValueError(f"transformers cannot describe the model: {reason}")
    summary: dict[str, Any] = json.loads(lines[-1])
    if "error" in summary:
        raise ValueError(summary["error"])
    return summary
