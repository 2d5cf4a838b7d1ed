"""From the prompts and messages of requests to token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed_core.api.step import I32
from tokenspeed_core.commands.serving import (
    BadRequestError,
    ChatTemplate,
    Ready,
    TemplateError,
    Tokenizer,
    read_ids,
)
from tokenspeed_server.protocol import ChatRequest, Message, ToolCall

MAX_PROMPTS = 512
MAX_CHARS_PER_TOKEN = 256  # vocabularies have no longer tokens: text beyond this cannot fit


def read_prompts(prompt: Any) -> list[str | I32]:
    """Return the prompts of a completion: texts, or int32 arrays of ids. Raises BadRequestError."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise BadRequestError(
            f"prompt must be text, token ids, or a list of either; found {type(prompt).__name__}",
            "prompt",
        )
    if not prompt or not isinstance(prompt[0], str | list):
        return [read_ids(prompt, "prompt")]
    if len(prompt) > MAX_PROMPTS:
        raise BadRequestError(
            f"prompt has {len(prompt)} prompts: at most {MAX_PROMPTS} in a request", "prompt"
        )
    if len(set(map(type, prompt))) > 1:
        raise BadRequestError(
            "prompt mixes texts and token ids: send one kind in a request", "prompt"
        )
    return [
        each if isinstance(each, str) else read_ids(each, f"prompt[{i}]")
        for i, each in enumerate(prompt)
    ]


def encode(
    tokenizer: Tokenizer | None,
    text: str,
    limits: Ready,
    *,
    add_special_tokens: bool,
    salt: str = "",
) -> I32:
    """Return the token ids of a prompt, or of rendered messages (without `add_special_tokens`).

    Raises BadRequestError for text that cannot fit, without tokenising it.
    """
    param = "prompt" if add_special_tokens else "messages"
    if tokenizer is None:
        raise BadRequestError(
            "this server runs with --skip-tokenizer-init: send token ids to /v1/completions", param
        )
    if len(text) > limits.longest * MAX_CHARS_PER_TOKEN:
        raise BadRequestError(
            f"{param} has {len(text)} characters, too long for a context of {limits.longest} tokens",
            param,
            "context_length_exceeded",
        )
    return tokenizer.encode(text, add_special_tokens=add_special_tokens, salt=salt)


def chat_ids(
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    request: ChatRequest,
    tools: Sequence[Mapping[str, Any]] | None,
    limits: Ready,
) -> I32:
    """Render and encode a chat, with `tools` as the user wrote them.

    Raises BadRequestError for messages that the template rejects.
    """
    if template is None:
        why = (
            "has no tokenizer"
            if tokenizer is None
            else "has no chat template: give one with --chat-template"
        )
        raise BadRequestError(f"this model {why}; use /v1/completions", "messages")
    options = dict(request.chat_template_kwargs)
    if request.reasoning_effort is not None:
        options.setdefault("reasoning_effort", request.reasoning_effort)
    messages = [
        _for_template(message, position, template)
        for position, message in enumerate(request.messages)
    ]
    try:
        text = template.render(messages, tools if request.tool_choice == "auto" else None, options)
    except TemplateError as error:
        raise BadRequestError(str(error), "messages") from error
    return encode(tokenizer, text, limits, add_special_tokens=False, salt=request.cache_salt)


def _for_template(message: Message, position: int, template: ChatTemplate) -> dict[str, Any]:
    """Return a message as templates expect it: content is one text, arguments are objects."""
    is_system = message.role == "developer" and not template.knows_developer
    rendered: dict[str, Any] = {"role": "system" if is_system else message.role}
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    rendered["content"] = "" if content is None and not message.tool_calls else content
    if message.tool_calls:
        where = f"messages[{position}].tool_calls"
        rendered["tool_calls"] = [
            _called(call, f"{where}[{i}]") for i, call in enumerate(message.tool_calls)
        ]
    reasoning = message.reasoning_content or message.reasoning
    for name, value in (
        ("name", message.name),
        ("tool_call_id", message.tool_call_id),
        ("reasoning_content", reasoning),
    ):
        if value is not None:
            rendered[name] = value
    return rendered


def _called(call: ToolCall, where: str) -> dict[str, Any]:
    arguments = _arguments(call.function.arguments, f"{where}.function.arguments")
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


def _arguments(given: str | dict[str, Any], param: str) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    try:
        value = json.loads(given or "{}")
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"{param} is not valid JSON: {error}", param) from error
    if not isinstance(value, dict):
        raise BadRequestError(f"{param} must be a JSON object in a string", param)
    return value
