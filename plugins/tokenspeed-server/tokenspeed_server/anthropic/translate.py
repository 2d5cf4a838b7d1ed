"""From the bodies of the Messages API to chat requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tokenspeed_core.commands.serving import BadRequestError, ChatTemplate
from tokenspeed_server.anthropic.protocol import (
    CountTokensRequest,
    InputMessage,
    JsonOutput,
    MessagesRequest,
    OutputConfig,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolParam,
    ToolResultBlock,
    ToolUseBlock,
)
from tokenspeed_server.api_body import validate
from tokenspeed_server.protocol import ChatRequest

# Variables of chat templates that switch thinking on and off: Qwen and GLM; DeepSeek and Kimi.
THINKING_SWITCHES = ("enable_thinking", "thinking")


def to_chat(body: CountTokensRequest, template: ChatTemplate | None) -> ChatRequest:
    """Return the chat request. Raises BadRequestError for features that a chat cannot express."""
    is_prefilled = body.messages[-1].role == "assistant"
    choice = body.tool_choice or ToolChoice(type="auto")
    output = body.output_config or OutputConfig()
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": [*_system(body), *_messages(body.messages)],
        "tools": tools_of(body.tools),
        "tool_choice": _tool_choice(choice),
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
        "continue_final_message": is_prefilled,
        "add_generation_prompt": not is_prefilled,
        "chat_template_kwargs": _thinking_switch(body, template),
        "reasoning_effort": output.effort,
        "response_format": None if output.format is None else _json_schema(output.format),
    }
    if isinstance(body, MessagesRequest):
        fields |= {
            "max_tokens": body.max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stop": list(body.stop_sequences),
            "stream": body.stream,
            "user": None if body.metadata is None else body.metadata.user_id,
        }
    return validate(ChatRequest, {k: v for k, v in fields.items() if v is not None})


def tools_of(tools: Sequence[ToolParam] | None) -> list[dict[str, Any]]:
    """Return tools in the format of OpenAI's chats."""
    functions = [
        {
            "name": tool.name,
            **({} if tool.description is None else {"description": tool.description}),
            "parameters": tool.input_schema,
            **({} if tool.strict is None else {"strict": tool.strict}),
        }
        for tool in tools or ()
    ]
    return [{"type": "function", "function": function} for function in functions]


def _thinking_switch(body: CountTokensRequest, template: ChatTemplate | None) -> dict[str, Any]:
    """Return the variables of the template that switch thinking."""
    if body.thinking is None or template is None:
        return {}
    is_on = body.thinking.type != "disabled"
    return {name: is_on for name in THINKING_SWITCHES if name in template.options}


def _tool_choice(choice: ToolChoice) -> Any:
    """Return the choice as chats have it. Raises BadRequestError."""
    match choice.type:
        case "tool" if choice.name is None:
            raise BadRequestError("tool_choice.name is required", "tool_choice.name")
        case "tool":
            return {"type": "function", "function": {"name": choice.name}}
        case "any":
            return "required"
        case _:
            return choice.type


def _json_schema(output: JsonOutput) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": output.schema_}}


def _system(body: CountTokensRequest) -> list[dict[str, Any]]:
    if not body.system:
        return []
    return [{"role": "system", "content": _text(body.system)}]


def _messages(messages: Iterable[InputMessage]) -> list[dict[str, Any]]:
    converted: list[dict[str, Any]] = []
    for message in messages:
        if isinstance(message.content, str):
            converted.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            converted.append(_assistant(message.content))
        else:
            converted += _user(message.role, message.content)
    return converted


def _assistant(blocks: Iterable[Any]) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ToolResultBlock():
                raise BadRequestError(
                    "a tool_result block must be in a message with the role user", "messages"
                )
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) or None}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message


def _user(role: str, blocks: Iterable[Any]) -> list[dict[str, Any]]:
    """Return a message for each run of text and for each tool result, in their order."""
    messages: list[dict[str, Any]] = []
    for block in blocks:
        match block:
            case TextBlock():
                if not messages or messages[-1]["role"] != role:
                    messages.append({"role": role, "content": []})
                messages[-1]["content"].append({"type": "text", "text": block.text})
            case ToolResultBlock():
                text = _text(block.content)
                messages.append(
                    {
                        "role": "tool",
                        "tool_call_id": block.tool_use_id,
                        "content": f"Error: {text}" if block.is_error else text,
                    }
                )
            case _:
                raise BadRequestError(
                    f"a {block.type} block must be in a message with the role assistant", "messages"
                )
    return messages or [{"role": role, "content": ""}]


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
