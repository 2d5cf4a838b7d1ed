"""All the behaviour that a plugin may add: a module of `tokenspeed.hooks` marks any of these as `hookimpl`.

No hook is called per token, and none on a step's way to the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from tokenspeed_core.config import Config

hookspec = pluggy.HookspecMarker("tokenspeed")
hookimpl = pluggy.HookimplMarker("tokenspeed")


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request that ended. `finish_reason` is "stop", "tool_calls", "length", "abort" or "error"; times in seconds."""

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reason: str
    time_to_first_token: float | None
    duration: float


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step that was collected. `duration`: seconds since its launch, or since the step before it was over."""

    step_id: int
    num_rows: int
    num_decodes: int
    num_tokens: int
    duration: float


@hookspec
def adjust_config(config: Config) -> Mapping[str, Any] | None:
    """Return settings to change before the configuration freezes. What the user set stays; so do the plugins used."""


@hookspec
def observe_request(record: RequestRecord) -> None:
    """Take note of a request that ended. Called in the API worker that answered it."""


@hookspec
def observe_step(record: StepRecord) -> None:
    """Take note of a step. Called in the engine process, after the next step was launched."""


@hookspec
def add_middleware(app: Any) -> Any:
    """Return an ASGI app that wraps the server's own (`app`), or None to leave it. Called in each API worker."""
