"""TokenSpeed's core: requests, KV blocks and which kernel to call; no model, no vendor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenspeed_core.api.sampling import SamplingParams
    from tokenspeed_core.engine.outputs import RequestOutput, SequenceOutput
    from tokenspeed_core.engine.requests import BadRequestError
    from tokenspeed_core.errors import TokenSpeedError
    from tokenspeed_core.llm import LLM

__all__ = [
    "LLM",
    "BadRequestError",
    "RequestOutput",
    "SamplingParams",
    "SequenceOutput",
    "TokenSpeedError",
]
__version__ = "0.1.0"

_PUBLIC = {
    "LLM": "tokenspeed_core.llm",
    "BadRequestError": "tokenspeed_core.engine.requests",
    "RequestOutput": "tokenspeed_core.engine.outputs",
    "SamplingParams": "tokenspeed_core.api.sampling",
    "SequenceOutput": "tokenspeed_core.engine.outputs",
    "TokenSpeedError": "tokenspeed_core.errors",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the command line stays light."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PUBLIC[name]), name)
