"""The bodies of the Messages API, and its fields that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from tokenspeed_core.api.sampling import MAX_STOP_STRINGS, StopString
from tokenspeed_server.api_body import ApiBody
from tokenspeed_server.body_part import BodyPart
from tokenspeed_server.protocol import MAX_MESSAGES, MAX_TOOLS, Identifier, Name

# The blocks of a message. Validation stops at the first wrong one: each error takes microseconds.
_BLOCKS = Field(max_length=4096, fail_fast=True)

CacheControl = Annotated[
    dict[str, Any] | None,
    Field(description="accepted without effect: the server caches all prefixes"),
]


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class TextBlock(BodyPart):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    citations: list[Any] | None = None


class ThinkingBlock(BodyPart):
    """Reasoning in an earlier message of the assistant. The signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(BodyPart):
    """Encrypted reasoning of another server. It is left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(BodyPart):
    """A tool call in an earlier message of the assistant."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(max_length=256)]
    name: Name
    input: dict[str, Any]
    cache_control: CacheControl = None
    caller: dict[str, Any] | None = None


class ToolResultBlock(BodyPart):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(max_length=256)]
    content: str | Annotated[list[TextBlock], _BLOCKS] = ""
    is_error: bool = False
    cache_control: CacheControl = None


ContentBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class InputMessage(BodyPart):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], _BLOCKS]


class ToolParam(BodyPart):
    """A tool that the client runs."""

    type: Literal["custom"] = "custom"
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: CacheControl = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[Any] | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[str] | None = None


class ToolChoice(BodyPart):
    """Whether the model may or must call tools. `name` is the tool of the type "tool"."""

    type: Literal["auto", "none", "any", "tool"]
    name: Name | None = None
    disable_parallel_tool_use: bool = False


class Thinking(BodyPart):
    """Whether the model thinks before it answers, if its chat template has a switch for that."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(
        None, ge=1, description="accepted; only max_tokens bounds the thinking"
    )
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="with omitted, thinking blocks are empty"
    )


class JsonOutput(BodyPart):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(BodyPart):
    """How to answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="passed to chat templates that read reasoning_effort"
    )
    format: JsonOutput | None = None


class Metadata(BodyPart):
    """Who sends the request."""

    user_id: Identifier | None = None


class CountTokensRequest(ApiBody):
    """The body of /v1/messages/count_tokens: the fields that make up the prompt."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "container": (),
        "mcp_servers": ([],),
        "inference_geo": (),
        "user_profile_id": (),
        "workspace_id": (),
        "speed": ("standard",),
    }

    model: Identifier | None = Field(None, description="default: the served model")
    messages: list[InputMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    system: str | Annotated[list[TextBlock], _BLOCKS] | None = None
    tools: Annotated[list[ToolParam], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl = None
    context_management: dict[str, Any] | None = Field(
        None, description="accepted without effect: the server keeps the whole conversation"
    )


class MessagesRequest(CountTokensRequest):
    """The body of /v1/messages."""

    max_tokens: int = Field(
        ge=1, le=2**31 - 1, description="maximum number of generated tokens, thinking included"
    )
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    stop_sequences: Annotated[
        tuple[StopString, ...],
        Field(max_length=MAX_STOP_STRINGS, fail_fast=True),
        BeforeValidator(_as_tuple),
    ] = ()
    stream: bool = False
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] = "auto"
    diagnostics: dict[str, Any] | None = None


BODIES = (MessagesRequest, CountTokensRequest)
