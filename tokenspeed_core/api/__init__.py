"""All that a plugin may import of the core (besides `commands` and `testing`), and what its `api` covers.

Stable: docs/contract.json holds every signature here, of what `tokenspeed_core` itself lists, of the hooks and of the
ops, beside `API_VERSION`. An addition raises its minor; whatever would break a plugin raises its major, and the `api`
of the kinds that it concerns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenspeed_core.api.attention import (
    AttentionFactory,
    AttentionKernel,
    AttentionLimits,
    AttentionProblem,
    AttentionStep,
)
from tokenspeed_core.api.cache_groups import (
    CacheGroupSpec,
    FullAttention,
    RecurrentState,
    SlidingWindow,
)
from tokenspeed_core.api.hooks import RequestRecord, StepRecord, hookimpl
from tokenspeed_core.api.kernels import (
    AutoDistribution,
    AxisLimit,
    Capability,
    KernelSpec,
    PlatformInfo,
    Ranking,
)
from tokenspeed_core.api.models import (
    AttentionCall,
    BuildContext,
    Checkpoint,
    LoadFormat,
    Model,
    ModelInfo,
    ModelSpec,
    Quantization,
    Rotation,
    WeightReader,
)
from tokenspeed_core.api.ops import DOTS, OpContract, Problem, Tolerance
from tokenspeed_core.api.parsers import ParserContext, ParserSpec, ReplyEvent, ReplyParser
from tokenspeed_core.api.policy import Candidate, Decision, Limits, Policy, Room, View
from tokenspeed_core.plugins.deprecations import DEPRECATED, warn

API_VERSION = "1.19"

__all__ = [
    "API_VERSION",
    "DOTS",
    "AttentionCall",
    "AttentionFactory",
    "AttentionKernel",
    "AttentionLimits",
    "AttentionProblem",
    "AttentionStep",
    "AutoDistribution",
    "AxisLimit",
    "BuildContext",
    "CacheGroupSpec",
    "Candidate",
    "Capability",
    "Checkpoint",
    "Decision",
    "FullAttention",
    "KernelSpec",
    "Limits",
    "LoadFormat",
    "Model",
    "ModelInfo",
    "ModelSpec",
    "OpContract",
    "ParserContext",
    "ParserSpec",
    "PlatformInfo",
    "Policy",
    "Problem",
    "Quantization",
    "Ranking",
    "RecurrentState",
    "ReplyEvent",
    "ReplyParser",
    "RequestRecord",
    "Room",
    "Rotation",
    "SlidingWindow",
    "StepRecord",
    "Tolerance",
    "View",
    "WeightReader",
    "hookimpl",
]

if not TYPE_CHECKING:  # with a __getattr__, type checkers would let every misspelt name pass

    def __getattr__(name: str) -> Any:
        """Return what is deprecated and stands here as `_name`, and warn whoever asks for it."""
        if (old := f"{__name__}.{name}") not in DEPRECATED:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        warn(old)
        return globals()[f"_{name}"]
