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
    CachePart,
    FullAttention,
    LatentAttention,
    SlidingWindow,
    keys_and_values,
)
from tokenspeed_core.api.grammars import (
    MAX_WHITESPACE,
    CallFunction,
    CallGrammar,
    CompiledGrammar,
    GrammarCompiler,
    GrammarError,
    GrammarKind,
    GrammarMatcher,
    GrammarRanking,
    GrammarSpec,
    Vocabulary,
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
from tokenspeed_core.api.logits_processors import (
    LogitsProcessor,
    LogitsProcessorContext,
    LogitsProcessorSpec,
    LogitsRows,
)
from tokenspeed_core.api.models import (
    AttentionCall,
    BuildContext,
    Checkpoint,
    LatentAttentionCall,
    LatentSizes,
    LoadFormat,
    Model,
    ModelInfo,
    ModelSpec,
    Rotation,
    WeightReader,
)
from tokenspeed_core.api.ops import DOTS, EXACT, OpContract, OpReference, Problem, Tolerance
from tokenspeed_core.api.parsers import (
    CallTemplate,
    ParserContext,
    ParserExample,
    ParserSpec,
    ReasoningMarks,
    ReplyEvent,
    ReplyParser,
)
from tokenspeed_core.api.policy import Candidate, Decision, Limits, Policy, Room, View
from tokenspeed_core.api.quantization import LayerSchemes, Quantization, QuantizationScheme

__all__ = [
    "DOTS",
    "EXACT",
    "MAX_WHITESPACE",
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
    "CachePart",
    "CallFunction",
    "CallGrammar",
    "CallTemplate",
    "Candidate",
    "Capability",
    "Checkpoint",
    "CompiledGrammar",
    "Decision",
    "FullAttention",
    "GrammarCompiler",
    "GrammarError",
    "GrammarKind",
    "GrammarMatcher",
    "GrammarRanking",
    "GrammarSpec",
    "KernelSpec",
    "LayerSchemes",
    "Limits",
    "LatentAttention",
    "LatentAttentionCall",
    "LatentSizes",
    "LoadFormat",
    "LogitsProcessor",
    "LogitsProcessorContext",
    "LogitsProcessorSpec",
    "LogitsRows",
    "Model",
    "ModelInfo",
    "ModelSpec",
    "OpContract",
    "OpReference",
    "ParserContext",
    "ParserExample",
    "ParserSpec",
    "PlatformInfo",
    "Policy",
    "Problem",
    "Quantization",
    "QuantizationScheme",
    "Ranking",
    "ReasoningMarks",
    "ReplyEvent",
    "ReplyParser",
    "RequestRecord",
    "Room",
    "Rotation",
    "SlidingWindow",
    "StepRecord",
    "Tolerance",
    "View",
    "Vocabulary",
    "WeightReader",
    "hookimpl",
    "keys_and_values",
]
