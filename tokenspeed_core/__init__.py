"""TokenSpeed's core: requests, KV blocks and which kernel to call; no model, no vendor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenspeed_core.engine.llm import LLM
    from tokenspeed_core.sampling import SamplingParams

__all__ = ["LLM", "SamplingParams"]
__version__ = "0.1.0"

_PUBLIC = {"LLM": "tokenspeed_core.engine.llm", "SamplingParams": "tokenspeed_core.sampling"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the command line stays light."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PUBLIC[name]), name)
