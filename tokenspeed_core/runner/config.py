"""What the runner is told when it is built. No tensor library is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenspeed_core.kernels.preference import Preference
from tokenspeed_core.models import ModelInfo, ModelSpec, Quantization


@dataclass(frozen=True)
class RunnerConfig:
    """Everything is resolved except what only the device can answer (its memory, the block size).

    `checkpoint_path` is a directory; `hf_config` its config.json with overrides applied. `dtype` is
    "float32", "bfloat16" or "float16"; `device` is "auto", "cpu", "cuda" or "cuda:N". `max_num_tokens` is
    the most query tokens of a step, `max_num_seqs` the number of slots. Memory is in bytes;
    `max_total_tokens` and `kv_cache_memory` override the computed size of the pool. `kv_dtype` is the cache's (None:
    `dtype`), `kv_scales` what each layer's keys and values are divided by in it (empty: 1). `num_threads` is for the
    CPU; None leaves torch's own choice (the physical cores, or OMP_NUM_THREADS). Where other processes keep
    cores busy, one thread fewer than cores is far better than one too many: every op ends in a barrier.
    """

    checkpoint_path: str
    hf_config: Mapping[str, Any]
    model_spec: ModelSpec
    model_info: ModelInfo
    dtype: str
    device: str
    load_format: str
    max_model_len: int
    max_num_seqs: int
    max_num_tokens: int
    block_size: int | None = None
    enforce_eager: bool = False
    max_cudagraph_capture_size: int | None = None
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_memory: int | None = None
    max_total_tokens: int | None = None
    kv_dtype: str | None = None
    kv_scales: tuple[float, ...] = ()
    quantization: Quantization | None = None
    preferences: tuple[Preference, ...] = ()
    backend_options: Mapping[str, Any] = field(default_factory=dict)  # by "backend.key"
    num_threads: int | None = None
