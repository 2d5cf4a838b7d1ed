"""The answers of the routes, for the OpenAPI description. Answers may have further fields."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class Usage(BaseModel):
    """Token counts of an answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(BaseModel):
    """One text. Without a tokenizer, a choice has `token_ids` instead."""

    index: int
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: Literal["stop", "length"]
    logprobs: dict[str, Any] | None = None


class CompletionAnswer(BaseModel):
    """The answer to a completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class AnswerMessage(BaseModel):
    """The message of an answer."""

    role: Literal["assistant"]
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(BaseModel):
    """One answer. Without a tokenizer, it has `token_ids`."""

    index: int
    message: AnswerMessage
    token_ids: list[int] | None = None
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: dict[str, Any] | None = None


class ChatAnswer(BaseModel):
    """The answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ResponsesAnswer(BaseModel):
    """A response of the Responses API."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any]


class DeletedResponse(BaseModel):
    """A response that is no longer stored."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(BaseModel):
    """A page of input items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class MessagesAnswer(BaseModel):
    """The answer of the Messages API."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: dict[str, Any]


class TokenCount(BaseModel):
    """The number of tokens of a prompt."""

    input_tokens: int


class TokenizeAnswer(BaseModel):
    """The tokens of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(BaseModel):
    """The text of tokens."""

    prompt: str


class ModelAnswer(BaseModel):
    """The served model. Its context length is null while the server starts."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(BaseModel):
    """A list of the served model."""

    object: Literal["list"]
    data: list[ModelAnswer]


class Version(BaseModel):
    """The server's version."""

    version: str


class Status(BaseModel):
    """The state of the server."""

    status: Literal["ok", "ready", "unavailable"]
    reason: str | None = None


class Plugins(BaseModel):
    """The plugins and kernels in use."""

    model: str
    plugins: list[dict[str, Any]]
    kernel_plan: dict[str, Any]


class Stats(BaseModel):
    """The engine's state; only `model` and `engine` until its first heartbeat."""

    model: str
    engine: Literal["starting", "ready", "dead"]
    requests: dict[str, int] | None = None
    kv_cache: dict[str, Any] | None = None
    totals: dict[str, int] | None = None
    window: dict[str, float | None] | None = None
    replicas: list[dict[str, Any] | None] | None = None


ANSWERS: tuple[type[BaseModel], ...] = (
    CompletionAnswer,
    ChatAnswer,
    ResponsesAnswer,
    DeletedResponse,
    InputItems,
    MessagesAnswer,
    TokenCount,
    TokenizeAnswer,
    DetokenizeAnswer,
    ModelAnswer,
    ModelList,
    Version,
    Status,
    Plugins,
    Stats,
)
