"""The contracts between the core and its plugins.

Plugins import the core only through this package and `tokenspeed_core.commands`. The number in an
entry point's extra (`[api1]`) refers to these contracts.
"""

from __future__ import annotations

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
from tokenspeed_core.api.ops import DOTS, EXACT, OpContract, OpReference, Problem, Tolerance
from tokenspeed_core.api.parsers import ParserContext, ParserSpec, ReplyEvent, ReplyParser
from tokenspeed_core.api.policy import Candidate, Decision, Limits, Policy, Room, View

__all__ = [
    "DOTS",
    "EXACT",
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
    "OpReference",
    "ParserContext",
    "ParserSpec",
    "PlatformInfo",
    "Policy",
    "Problem",
    "Quantization",
    "Ranking",
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
