"""TokenSpeed's core: engine, scheduler, KV cache, plugins and kernel selection, without models and kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenspeed_core.api.sampling import SamplingParams
    from tokenspeed_core.api.structured_outputs import StructuredOutputs
    from tokenspeed_core.async_llm import AsyncLLM
    from tokenspeed_core.engine.outputs import RequestOutput, SequenceOutput
    from tokenspeed_core.engine.stats import EngineStats
    from tokenspeed_core.errors import BadRequestError, TokenSpeedError
    from tokenspeed_core.llm import LLM

__all__ = [
    "LLM",
    "AsyncLLM",
    "BadRequestError",
    "EngineStats",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "SequenceOutput",
    "TokenSpeedError",
]
__version__ = "0.1.0"

_PUBLIC = {
    "LLM": "tokenspeed_core.llm",
    "AsyncLLM": "tokenspeed_core.async_llm",
    "BadRequestError": "tokenspeed_core.errors",
    "EngineStats": "tokenspeed_core.engine.stats",
    "RequestOutput": "tokenspeed_core.engine.outputs",
    "SamplingParams": "tokenspeed_core.api.sampling",
    "StructuredOutputs": "tokenspeed_core.api.structured_outputs",
    "SequenceOutput": "tokenspeed_core.engine.outputs",
    "TokenSpeedError": "tokenspeed_core.errors",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the command line stays light."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    """List the public names, also before they are imported."""
    return sorted({*globals(), *__all__})
