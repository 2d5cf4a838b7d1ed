"""The request bodies of the OpenAI routes: their fields with bounds, and the OpenAI fields that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
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
from tokenspeed_core.commands.serving import BadRequestError
from tokenspeed_server.api_body import ApiBody, allow_null
from tokenspeed_server.body_part import BodyPart
from tokenspeed_server.structured import StructuredFields

MAX_MESSAGES = 16384
MAX_TOOLS = 1024
# Lists of a message. Validation stops at the first wrong item: each error takes microseconds.
_PARTS = Field(max_length=4096, fail_fast=True)
_TOOLS = Field(max_length=MAX_TOOLS, fail_fast=True)
_CALLS = Field(max_length=1024, fail_fast=True)

Name = Annotated[str, Field(min_length=1, max_length=256)]
Identifier = Annotated[str, Field(max_length=1024)]


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


class StreamOptions(BodyPart):
    """Options of a stream."""

    include_usage: bool = Field(False, description="end with an event that has the usage")
    continuous_usage_stats: bool = Field(
        False, description="every event has the usage so far; implies include_usage"
    )
    include_obfuscation: bool = Field(False, description="accepted; streams are not padded")


class GenerationRequest(SamplingParams, StructuredFields, ApiBody):
    """The fields of both routes. As with OpenAI, fields that identify a caller have no effect."""

    model_config = ConfigDict(strict=True, extra="ignore", json_schema_extra=allow_null)

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "use_beam_search": (False,),
        "length_penalty": (1.0,),
        "bad_words": ([],),
        "allowed_token_ids": (),
        "truncate_prompt_tokens": (),
        "spaces_between_special_tokens": (True,),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
        "kv_transfer_params": (),
        "lora_path": (),
        "no_stop_trim": (False,),
        "custom_logit_processor": (),
        "return_hidden_states": (False,),
        "prompt_cache_retention": ("in_memory", "24h"),
        "moderation": (),
    }

    stop: Annotated[
        tuple[StopString, ...],
        Field(max_length=MAX_STOP_STRINGS, fail_fast=True),
        BeforeValidator(_as_tuple),
        WithJsonSchema(_STOP_SCHEMA),
    ] = ()
    stop_token_ids: Annotated[
        tuple[TokenId, ...],
        Field(max_length=MAX_STOP_TOKENS, fail_fast=True, description="end at these tokens"),
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
    best_of: int | None = Field(None, ge=1, description="accepted if it equals n")
    store: bool = Field(False, description="accepted; this route stores nothing")
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] = Field(
        "auto", description="accepted; there is one tier"
    )

    def fields_without_effect(self) -> list[str]:
        """Return the fields that ask for something that this server does not have."""
        is_padded = self.stream_options is not None and self.stream_options.include_obfuscation
        asked = {
            "store": self.store,
            "service_tier": self.service_tier not in ("auto", "default"),
            "stream_options.include_obfuscation": is_padded,
        }
        return [name for name, is_asked in asked.items() if is_asked]

    def sampling_params(self) -> SamplingParams:
        """Return the sampling parameters. Raises BadRequestError for fields that contradict."""
        if self.best_of not in (None, self.n):
            raise BadRequestError(
                f"best_of {self.best_of} is not supported: omit it, or set it to n ({self.n})",
                "best_of",
                "unsupported",
            )
        if self.stream and self.prompt_logprobs is not None:
            raise BadRequestError(
                "prompt_logprobs is not streamed: set stream to false",
                "prompt_logprobs",
                "unsupported",
            )
        return self


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationRequest.unsupported,
        "suffix": ("",),
        "prompt_embeds": (),
        "add_special_tokens": (True,),
    }

    # Prompts may be long lists of ids: `tokenspeed_server.prompts` checks them in one pass.
    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]
    echo: bool = Field(False, description="start the text, and the logprobs, with the prompt")

    def sampling_params(self) -> SamplingParams:
        if self.stream and self.echo and self.logprobs is not None:
            raise BadRequestError(
                "echo with logprobs is not streamed: set stream to false", "echo", "unsupported"
            )
        if not self.echo or self.logprobs is None:
            return super().sampling_params()
        wanted = max(self.logprobs, self.prompt_logprobs or 0)
        return super().sampling_params().model_copy(update={"prompt_logprobs": wanted})


class TextPart(BodyPart):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(BodyPart):
    """The function of a tool call."""

    name: Name
    arguments: str | dict[str, Any]


class ToolCall(BodyPart):
    """A tool call in an earlier message of the assistant."""

    id: str | None = Field(None, max_length=256)
    type: Literal["function"] = "function"
    index: int | None = None
    function: CalledFunction


class Message(BodyPart):
    """A message of any role."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], _PARTS] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], _CALLS] | None = None
    tool_call_id: str | None = Field(None, max_length=256)
    reasoning_content: str | None = None
    reasoning: str | None = None
    # Replayed answers of the assistant have these. A refusal is text; annotations have no effect.
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class FunctionSpec(BodyPart):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(BodyPart):
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
        "verbosity": ("medium",),
        "web_search_options": (),
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

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    tools: Annotated[list[ToolSpec], _TOOLS] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] = Field(
        "auto",
        description="with none, the prompt has no tools; an object names the tool to call, or the allowed ones",
    )
    parallel_tool_calls: bool = Field(
        True, description="if false, the answer ends after its first tool call"
    )
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, max_length=64)
    reasoning_effort: str | None = Field(None, max_length=32)
    add_generation_prompt: bool = Field(
        True, description="whether the prompt ends with the start of the assistant's answer"
    )
    continue_final_message: bool = Field(
        False, description="the answer continues the last message; needs no generation prompt"
    )
    logprobs: bool = Field(  # a number in completions
        False, description="report the log-probability of each token"
    )
    top_logprobs: int = Field(0, ge=0, le=20, description="alternatives reported per token")
    max_tokens: int | None = Field(
        None, ge=1, le=2**31 - 1, description="maximum number of generated tokens"
    )
    max_completion_tokens: int | None = Field(
        None, ge=1, le=2**31 - 1, description="OpenAI's newer name of max_tokens"
    )

    def sampling_params(self) -> SamplingParams:
        super().sampling_params()
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
