"""All that a plugin may import of the core (besides `tokenspeed_core.testing`), and what its `api` covers."""

from __future__ import annotations

from tokenspeed_core.kernels.attention import (
    AttentionFactory,
    AttentionKernel,
    AttentionLimits,
    AttentionProblem,
    AttentionStep,
)
from tokenspeed_core.kv.groups import CacheGroupSpec, FullAttention, RecurrentState, SlidingWindow
from tokenspeed_core.models import (
    AttentionCall,
    BuildContext,
    Checkpoint,
    LoadFormat,
    Model,
    ModelInfo,
    ModelSpec,
    WeightReader,
)

__all__ = [
    "AttentionCall",
    "AttentionFactory",
    "AttentionKernel",
    "AttentionLimits",
    "AttentionProblem",
    "AttentionStep",
    "BuildContext",
    "CacheGroupSpec",
    "Checkpoint",
    "FullAttention",
    "LoadFormat",
    "Model",
    "ModelInfo",
    "ModelSpec",
    "RecurrentState",
    "SlidingWindow",
    "WeightReader",
]
