"""The bodies of the OpenAI routes: what is read, what is refused by name, and the bounds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tokenspeed_core.api.sampling import SamplingParams
from tokenspeed_core.commands.serving import BadRequestError, suggest

MAX_MESSAGES = 16384
MAX_TOOLS = 1024

Name = Annotated[str, Field(min_length=1, max_length=256)]


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Body):
    """What a stream carries beside text."""

    include_usage: bool = Field(False, description="end with an event that has the usage")
    include_obfuscation: Literal[False] = False


class _Request(_Body):
    """Fields of both routes. What identifies a caller is accepted and changes nothing, as OpenAI has it."""

    model: str | None = Field(
        None, max_length=1024, description="the served model; none: the one there is"
    )
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1, description="lower runs first")
    cache_salt: str = Field(
        "", max_length=256, description="requests share cached blocks with equal salts only"
    )
    user: str | None = Field(None, max_length=1024)
    safety_identifier: str | None = Field(None, max_length=1024)
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = Field(None, max_length=1024)


class CompletionRequest(_Request):
    """The body of /v1/completions. `prompt` is read by `tokenspeed_server.prompts`."""

    prompt: Any = Field(description="text, token ids, or a list of either")


class TextPart(_Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(_Body):
    """What the assistant called."""

    name: Name
    arguments: str | dict[str, Any]


class ToolCall(_Body):
    """A call in the history of a chat."""

    id: str | None = Field(None, max_length=256)
    type: Literal["function"] = "function"
    index: int | None = None
    function: CalledFunction


class Message(_Body):
    """A message of any role."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: Name | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = Field(None, max_length=256)
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = Field(None, max_length=0)


class FunctionSpec(_Body):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class ToolSpec(_Body):
    """A tool that the model may use."""

    type: Literal["function"]
    function: FunctionSpec


class ChatRequest(_Request):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: list[ToolSpec] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto"] = Field(
        "auto", description="none leaves the tools out of the prompt"
    )
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, max_length=64)
    reasoning_effort: str | None = Field(None, max_length=32)


class ChatNames(_Body):
    """What chats call otherwise than `SamplingParams` does; both names of the length mean the same."""

    logprobs: bool = Field(False, description="report the log-probability of each token")
    top_logprobs: int = Field(0, ge=0, le=20, description="alternatives reported per token")
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)


R = TypeVar("R", bound=_Request)
B = TypeVar("B", bound=BaseModel)


def parse(body: bytes, kind: type[R]) -> tuple[R, SamplingParams, dict[str, Any]]:
    """Read a request's body: the request, its sampling, and the JSON as it came.

    Raises BadRequestError naming the field, what was found and the bound.
    """
    try:
        raw = pydantic_core.from_json(
            body
        )  # NaN passes here, so that the field that holds it is named
    except ValueError as error:
        raise BadRequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise BadRequestError("the body must be a JSON object")
    given = {name: value for name, value in raw.items() if value is not None}
    for name, neutral in _not_built(kind).items():
        value = given.pop(name, None)
        if value is not None and value not in neutral:
            raise BadRequestError(
                f"{name} is not supported by this server yet: leave it out", name, "unsupported"
            )
    if kind is ChatRequest:
        _read_chat_names(given)
    sampling = {
        name: given.pop(name) for name in list(given) if name in SamplingParams.model_fields
    }
    _read_lists(sampling)
    params = validate(SamplingParams, sampling)
    _refuse_unknown(given, kind)
    return validate(kind, given), params, raw


@cache
def _not_built(kind: type[_Request]) -> Mapping[str, Sequence[Any]]:
    """Return the fields of others' servers that this one knows and lacks, each with the values that change nothing."""
    tables = json.loads(Path(__file__).with_name("not_built.json").read_text())
    return {**tables["both"], **tables[kind.__name__]}


def _read_chat_names(given: dict[str, Any]) -> None:
    """Turn what only chats have into the names of `SamplingParams`, in place."""
    if isinstance(given.get("tool_choice"), dict) or given.get("tool_choice") == "required":
        raise BadRequestError(
            "tool_choice can be 'auto' or 'none': forcing a call is not supported by this server yet",
            "tool_choice",
            "unsupported",
        )
    asked = validate(
        ChatNames, {name: given.pop(name) for name in ChatNames.model_fields if name in given}
    )
    if asked.top_logprobs and not asked.logprobs:
        raise BadRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    if asked.logprobs:
        given["logprobs"] = asked.top_logprobs
    if asked.max_tokens and asked.max_completion_tokens not in (None, asked.max_tokens):
        raise BadRequestError(
            "max_tokens and max_completion_tokens differ: send one of them", "max_tokens"
        )
    given["max_tokens"] = asked.max_completion_tokens or asked.max_tokens


def _read_lists(sampling: dict[str, Any]) -> None:
    """Turn JSON's shapes into those of `SamplingParams`, in place."""
    stop = sampling.get("stop")
    if isinstance(stop, str):
        sampling["stop"] = (stop,)
    for name in ("stop", "stop_token_ids"):
        if isinstance(sampling.get(name), list):
            sampling[name] = tuple(sampling[name])
    bias = sampling.get("logit_bias")
    if isinstance(bias, dict):
        sampling["logit_bias"] = {
            int(key) if key.isascii() and key.isdigit() and len(key) < 11 else key: value
            for key, value in bias.items()
        }


def _refuse_unknown(given: Mapping[str, Any], kind: type[_Request]) -> None:
    known = {
        *kind.model_fields,
        *SamplingParams.model_fields,
        "max_completion_tokens",
        "top_logprobs",
    }
    for name in given:
        if name not in kind.model_fields:
            what = f"unknown field {name[:64]!r}{suggest(name[:64], sorted(known))}"
            raise BadRequestError(what, name[:64], "unknown_field")


def validate(kind: type[B], value: Any) -> B:
    """Return a value as a model, strictly. Raises BadRequestError naming the first field at fault."""
    try:
        return kind.model_validate(value, strict=True)
    except ValidationError as error:
        raise _bad_field(error) from error


def _bad_field(error: ValidationError) -> BadRequestError:
    problems = error.errors(include_url=False, include_context=False)
    first = max(problems, key=lambda problem: len(problem["loc"]))
    steps = [
        part
        for part in first["loc"]
        if isinstance(part, int) or (part.isidentifier() and part != "str")
    ]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in steps)
    path = path.lstrip(".") or "body"
    if first["type"] == "extra_forbidden":
        return BadRequestError(f"unknown field {path[:200]!r}", path[:200], "unknown_field")
    found = json.dumps(first["input"], default=str)
    found = found if len(found) <= 80 else found[:77] + "..."
    missing = first["type"] == "missing"
    message = (
        f"{path[:200]} is required" if missing else f"{path[:200]}: {first['msg']} (found {found})"
    )
    return BadRequestError(message, path[:200])
