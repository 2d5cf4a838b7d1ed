"""The request bodies of the OpenAI routes: their fields with bounds, and the OpenAI fields that are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic_core
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
)

from tokenspeed_core.api.sampling import (
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    Bias,
    SamplingParams,
    StopString,
    TokenId,
)
from tokenspeed_core.commands.serving import BadRequestError, suggest

MAX_MESSAGES = 16384
MAX_TOOLS = 1024

Name = Annotated[str, Field(min_length=1, max_length=256)]
Identifier = Annotated[str, Field(max_length=1024)]


def _allow_null(schema: dict[str, Any]) -> None:
    """Let optional fields be null, which means the same as leaving them out."""
    required = schema.get("required", ())
    for name, field in schema["properties"].items():
        if name not in required and {"type": "null"} not in field.get("anyOf", ()):
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}]}


def _as_tuple(value: Any) -> Any:
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _with_integer_keys(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        int(key) if key.isascii() and key.isdigit() and len(key) < 11 else key: bias
        for key, bias in value.items()
    }


_STOP_STRING = {"type": "string", "minLength": 1, "maxLength": 256}
_STOP_SCHEMA = {
    "anyOf": [_STOP_STRING, {"type": "array", "items": _STOP_STRING, "maxItems": MAX_STOP_STRINGS}],
    "description": "text ends before the first of these strings",
}
_PROMPT_SCHEMA = {
    "description": "text, token ids, or a list of either",
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        {
            "type": "array",
            "minItems": 1,
            "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        },
    ],
}


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Body):
    """Options of a stream."""

    include_usage: bool = Field(False, description="end with an event that has the usage")
    include_obfuscation: Literal[False] = False


class GenerationRequest(SamplingParams):
    """The fields of both routes. As with OpenAI, fields that identify a caller have no effect."""

    model_config = ConfigDict(strict=True, json_schema_extra=_allow_null)

    # OpenAI's and other servers' fields without an implementation here. Each is accepted with
    # null and with the listed values, which ask for what this server does anyway.
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "store": (False,),
        "service_tier": ("auto", "default"),
        "min_tokens": (0,),
        "prompt_logprobs": (),
        "use_beam_search": (False,),
        "length_penalty": (1.0,),
        "bad_words": ([],),
        "allowed_token_ids": (),
        "truncate_prompt_tokens": (),
        "spaces_between_special_tokens": (True,),
        "logits_processors": (),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "structured_outputs": (),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
        "kv_transfer_params": (),
        "lora_path": (),
        "response_format": ({"type": "text"},),
        "regex": (),
        "ebnf": (),
        "json_schema": (),
        "no_stop_trim": (False,),
        "custom_logit_processor": (),
        "return_hidden_states": (False,),
        "prompt_cache_retention": ("in_memory",),
        "moderation": (),
    }

    stop: Annotated[
        tuple[StopString, ...],
        Field(max_length=MAX_STOP_STRINGS),
        BeforeValidator(_as_tuple),
        WithJsonSchema(_STOP_SCHEMA),
    ] = ()
    stop_token_ids: Annotated[
        tuple[TokenId, ...],
        Field(max_length=MAX_STOP_TOKENS, description="end at these tokens"),
        BeforeValidator(_as_tuple),
    ] = ()
    logit_bias: Annotated[
        dict[TokenId, Bias],
        Field(max_length=MAX_LOGIT_BIAS, description="added to the logits of these tokens"),
        BeforeValidator(_with_integer_keys),
    ] = Field(default_factory=dict)
    model: str | None = Field(None, max_length=1024, description="default: the served model")
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1, description="lower runs first")
    cache_salt: str = Field(
        "", max_length=256, description="only requests with equal salts share cached blocks"
    )
    user: Identifier | None = None
    safety_identifier: Identifier | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: Identifier | None = None

    def sampling_params(self) -> SamplingParams:
        """Return the sampling parameters. Raises BadRequestError for fields that contradict."""
        return self


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationRequest.unsupported,
        "echo": (False,),
        "suffix": ("",),
        "best_of": (1,),
        "prompt_embeds": (),
        "add_special_tokens": (True,),
    }

    # Prompts may be long lists of ids: `tokenspeed_server.prompts` checks them in one pass.
    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]


class TextPart(_Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(_Body):
    """The function of a tool call."""

    name: Name
    arguments: str | dict[str, Any]


class ToolCall(_Body):
    """A tool call in an earlier message of the assistant."""

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


class ChatRequest(GenerationRequest):
    """The body of /v1/chat/completions."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationRequest.unsupported,
        "audio": (),
        "modalities": (["text"],),
        "prediction": (),
        "functions": (),
        "function_call": ("none",),
        "parallel_tool_calls": (True,),
        "verbosity": ("medium",),
        "web_search_options": (),
        "continue_final_message": (False,),
        "add_generation_prompt": (True,),
        "documents": (),
        "chat_template": (),
        "echo": (False,),
        "add_special_tokens": (False,),
        "mm_processor_kwargs": (),
        "include_reasoning": (True,),
        "separate_reasoning": (),
        "stream_reasoning": (True,),
        "thinking_token_budget": (),
    }

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: list[ToolSpec] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto"] = Field(
        "auto", description="with none, the prompt has no tools"
    )
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, max_length=64)
    reasoning_effort: str | None = Field(None, max_length=32)
    logprobs: bool = Field(  # a number in completions
        False, description="report the log-probability of each token"
    )
    top_logprobs: int = Field(0, ge=0, le=20, description="alternatives reported per token")
    max_completion_tokens: int | None = Field(
        None, ge=1, description="OpenAI's newer name of max_tokens"
    )

    def sampling_params(self) -> SamplingParams:
        if self.top_logprobs and not self.logprobs:
            raise BadRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
        lengths = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(lengths) > 1:
            raise BadRequestError(
                "max_tokens and max_completion_tokens differ: send one of them", "max_tokens"
            )
        values = {name: getattr(self, name) for name in SamplingParams.model_fields}
        values["logprobs"] = self.top_logprobs if self.logprobs else None
        values["max_tokens"] = next(iter(lengths), None)
        return SamplingParams.model_construct(**values)


R = TypeVar("R", bound=GenerationRequest)


def parse_body(body: bytes, kind: type[R]) -> tuple[R, dict[str, Any]]:
    """Return a request's body as a model, and as plain JSON.

    Raises BadRequestError that names the first wrong field, its value and its bound.
    """
    try:
        raw = pydantic_core.from_json(body)
    except ValueError as error:
        raise BadRequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise BadRequestError("the body must be a JSON object")
    given = {name: value for name, value in raw.items() if value is not None}
    _refuse_unsupported(given, kind)
    for name in given:
        if name not in kind.model_fields:
            hint = suggest(name[:64], sorted(kind.model_fields))
            raise BadRequestError(f"unknown field {name[:64]!r}{hint}", name[:64], "unknown_field")
    try:
        return kind.model_validate(given, strict=True), raw
    except ValidationError as error:
        raise _bad_field(error) from error


def _refuse_unsupported(given: dict[str, Any], kind: type[GenerationRequest]) -> None:
    """Remove unsupported fields that change nothing. Raises BadRequestError for others."""
    for name in [name for name in given if name in kind.unsupported]:
        if given.pop(name) not in kind.unsupported[name]:
            raise BadRequestError(f"{name} is not supported: leave it out", name, "unsupported")
    tool_choice = given.get("tool_choice")
    if isinstance(tool_choice, dict) or tool_choice == "required":
        raise BadRequestError(
            "tool_choice must be 'auto' or 'none': forcing a call is not supported",
            "tool_choice",
            "unsupported",
        )


def _bad_field(error: ValidationError) -> BadRequestError:
    problems = error.errors(include_url=False, include_context=False)
    first = max(problems, key=lambda problem: len(problem["loc"]))
    steps = [
        part
        for part in first["loc"]
        if isinstance(part, int) or (part.isidentifier() and part != "str")
    ]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in steps)
    path = path.lstrip(".")[:200] or "body"
    if first["type"] == "extra_forbidden":
        return BadRequestError(f"unknown field {path!r}", path, "unknown_field")
    if first["type"] == "missing":
        return BadRequestError(f"{path} is required", path)
    found = json.dumps(first["input"], default=str)
    found = found if len(found) <= 80 else found[:77] + "..."
    return BadRequestError(f"{path}: {first['msg']} (found {found})", path)
