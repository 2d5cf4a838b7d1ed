"""From items of the Responses API to chat requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tokenspeed_server.api_body import validate
from tokenspeed_server.protocol import ChatRequest
from tokenspeed_server.responses_api.protocol import (
    AllowedTools,
    ChosenFunction,
    FunctionCallItem,
    FunctionCallOutputItem,
    FunctionTool,
    Item,
    JsonSchemaFormat,
    MessageItem,
    ReasoningItem,
    Refusal,
    ResponsesRequest,
    Text,
)
from tokenspeed_server.structured import JsonObjectFormat, TextFormat


def to_chat(body: ResponsesRequest, items: Iterable[Item]) -> ChatRequest:
    """Return the chat request for a conversation. Raises BadRequestError."""
    system = [] if body.instructions is None else [_message("system", body.instructions)]
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": [*system, *_messages(items)],
        "tools": tools_of(body.tools),
        "tool_choice": _tool_choice(body.tool_choice),
        "response_format": None if body.text is None else _output_format(body.text.format),
        "parallel_tool_calls": body.parallel_tool_calls,
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "logprobs": body.wants_logprobs,
        "top_logprobs": body.top_logprobs if body.wants_logprobs else 0,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "stream": body.stream,
        "user": body.user,
    }
    return validate(ChatRequest, {k: v for k, v in fields.items() if v is not None})


def tools_of(tools: Sequence[FunctionTool] | None) -> list[dict[str, Any]]:
    """Return tools in the format of OpenAI's chats."""
    functions = [
        {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "strict": tool.strict,
        }
        for tool in tools or ()
    ]
    return [
        {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}
        for function in functions
    ]


def _tool_choice(choice: str | ChosenFunction | AllowedTools) -> Any:
    match choice:
        case ChosenFunction():
            return _chosen(choice)
        case AllowedTools():
            allowed = {"mode": choice.mode, "tools": [_chosen(tool) for tool in choice.tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        case _:
            return choice


def _chosen(function: ChosenFunction) -> dict[str, Any]:
    return {"type": "function", "function": {"name": function.name}}


def _output_format(
    given: TextFormat | JsonObjectFormat | JsonSchemaFormat | None,
) -> dict[str, Any] | None:
    """Return the format as chats have it, where the schema is in a nested object."""
    if given is None or not isinstance(given, JsonSchemaFormat):
        return None if given is None else {"type": given.type}
    return {"type": "json_schema", "json_schema": {"schema": given.schema_}}


def _messages(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return the messages of a conversation. Reasoning, text and calls of a turn are one message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                _assistant(messages, "content")["content"] = _text(item.content)
            case MessageItem():
                messages.append(_message(item.role, _text(item.content)))
            case ReasoningItem():
                thoughts = [part.text for part in item.content or item.summary]
                if thoughts:
                    message = _assistant(messages, "content", "tool_calls", "reasoning_content")
                    message["reasoning_content"] = "\n".join(thoughts)
            case FunctionCallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                _assistant(messages).setdefault("tool_calls", []).append(call)
            case FunctionCallOutputItem():
                result = _message("tool", _text(item.output))
                messages.append({**result, "tool_call_id": item.call_id})
    return messages


def _assistant(messages: list[dict[str, Any]], *free: str) -> dict[str, Any]:
    """Return the last message if it is the assistant's and lacks the `free` fields, else a new one."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(name) for name in free):
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _text(content: str | Sequence[Text | Refusal]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.refusal if isinstance(part, Refusal) else part.text for part in content)
