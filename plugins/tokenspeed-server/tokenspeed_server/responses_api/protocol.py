"""The body of /v1/responses: its items, its tools, and its fields that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter

from tokenspeed_server.api_body import ApiBody
from tokenspeed_server.body_part import BodyPart
from tokenspeed_server.protocol import MAX_TOOLS, Identifier, Name
from tokenspeed_server.structured import JsonObjectFormat, TextFormat

MAX_ITEMS = 16384

# Lists of an item. Validation stops at the first wrong part: each error takes microseconds.
_PARTS = Field(max_length=4096, fail_fast=True)
_Id = Annotated[str, Field(max_length=256)]


class Text(BodyPart):
    """Text of a message, of a call's output, or of the model."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Refusal(BodyPart):
    """A refusal in an earlier message of the assistant."""

    type: Literal["refusal"]
    refusal: str


class MessageItem(BodyPart):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[Annotated[Text | Refusal, Field(discriminator="type")]], _PARTS]
    id: _Id | None = None
    status: str | None = None
    phase: str | None = None


class FunctionCallItem(BodyPart):
    """A call of a function by the model."""

    type: Literal["function_call"]
    call_id: _Id
    name: Name
    arguments: str
    id: _Id | None = None
    status: str | None = None


class FunctionCallOutputItem(BodyPart):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: _Id
    output: str | Annotated[list[Text], _PARTS]
    id: _Id | None = None
    status: str | None = None


class ReasoningText(BodyPart):
    """A part of the model's reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(BodyPart):
    """Reasoning of the model. Encrypted reasoning of other servers is not added to the prompt."""

    type: Literal["reasoning"]
    id: _Id | None = None
    summary: Annotated[list[ReasoningText], _PARTS] = Field(default_factory=list)
    content: Annotated[list[ReasoningText], _PARTS] | None = None
    encrypted_content: str | None = None
    status: str | None = None


def _kind_of_item(value: Any) -> Any:
    """Return the type of an item. Messages may leave it out."""
    if isinstance(value, dict):
        return value.get("type", "message")
    return getattr(value, "type", None)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind_of_item),
]
Items = TypeAdapter(list[Item])


class FunctionTool(BodyPart):
    """A function that the model may call."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenFunction(BodyPart):
    """The function that must be called."""

    type: Literal["function"]
    name: Name


class AllowedTools(BodyPart):
    """The tools that may be called. With the mode "required", at least one must be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenFunction], Field(max_length=MAX_TOOLS, fail_fast=True)]


class Reasoning(BodyPart):
    """How much to think before the answer."""

    effort: str | None = Field(None, max_length=32)
    summary: str | None = Field(
        None, max_length=32, description="accepted without effect: reasoning is returned whole"
    )


class JsonSchemaFormat(BodyPart):
    """JSON that fits a schema. The output is held to it with `strict` and without."""

    type: Literal["json_schema"]
    name: str | None = Field(None, max_length=256)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextOptions(BodyPart):
    """Options of the text of the answer."""

    format: (
        Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
        | None
    ) = None
    verbosity: Literal["medium"] | None = None


class StreamOptions(BodyPart):
    """Options of a stream."""

    include_obfuscation: bool | None = Field(
        None, description="accepted without effect: events are not padded"
    )


class ResponsesRequest(ApiBody):
    """The body of /v1/responses."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (False,),
        "conversation": (),
        "context_management": (),
        "max_tool_calls": (),
        "moderation": (),
        "prompt": (),
        "truncation": ("disabled",),
        "service_tier": ("auto", "default"),
    }

    model: Identifier | None = Field(None, description="default: the served model")
    input: str | Annotated[list[Item], Field(max_length=MAX_ITEMS, fail_fast=True)]
    instructions: str | None = Field(
        None, description="a system message, which later responses do not inherit"
    )
    previous_response_id: _Id | None = None
    store: bool = Field(True, description="keep the response for a later request")
    stream: bool = False
    stream_options: StreamOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | AllowedTools = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: int = Field(0, ge=0, le=20)
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    include: list[str] | None = Field(None, max_length=16)
    metadata: dict[str, Any] | None = None
    user: Identifier | None = None
    safety_identifier: Identifier | None = None
    prompt_cache_key: Identifier | None = None
    prompt_cache_retention: str | None = Field(None, max_length=32)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the text comes with the log-probability of each token."""
        return "message.output_text.logprobs" in (self.include or ())

    def fields_without_effect(self) -> list[str]:
        options = self.stream_options
        has_padding = options is not None and bool(options.include_obfuscation)
        has_summary = self.reasoning is not None and self.reasoning.summary is not None
        names = ["reasoning.summary"] if has_summary else []
        return [*names, "stream_options.include_obfuscation"] if has_padding else names
