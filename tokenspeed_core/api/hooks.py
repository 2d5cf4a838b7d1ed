"""The hooks: functions that a module of the group `tokenspeed.hooks` may implement with `@hookimpl`.

No hook is called per token or between planning a step and launching it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from tokenspeed_core.config import Config

hookspec = pluggy.HookspecMarker("tokenspeed")
hookimpl = pluggy.HookimplMarker("tokenspeed")


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A finished request. Times are in seconds.

    `finish_reason` is "stop", "tool_calls", "length", "abort" or "error". `time_to_first_token` is None
    if no token was produced.
    """

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reason: str
    time_to_first_token: float | None
    duration: float
    model: str = ""
    operation: str = ""  # "chat" or "text_completion"
    parameters: Mapping[str, Any] = field(
        default_factory=dict
    )  # sampling parameters of the request
    client_request_id: str = ""  # the client's X-Request-Id
    traceparent: str = ""  # the client's W3C trace context
    error: str = ""  # why the engine could not finish it


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A finished step of the engine.

    `duration` is in seconds, since the launch of this step or the end of the previous one, whichever is
    later.
    """

    step_id: int
    num_rows: int
    num_decodes: int
    num_tokens: int
    duration: float


@hookspec
def adjust_config(config: Config) -> Mapping[str, Any] | None:
    """Return settings to change before the configuration is frozen.

    Settings that the user set, and those that select plugins, cannot be changed. `config` has the settings of a server,
    such as `port`, only in a server.
    """


@hookspec
def observe_request(record: RequestRecord) -> None:
    """Receive a finished request. Called in the API worker that answered it."""


@hookspec
def observe_step(record: StepRecord) -> None:
    """Receive a finished step. Called in the engine process, after the next step was launched."""


@hookspec
def add_middleware(app: Any) -> Any:
    """Return an ASGI app that wraps `app`, or None for no change. Called in each API worker at start."""
