"""From the prompts and messages of requests to token ids."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pydantic_core

from tokenspeed_core.api.step import I32
from tokenspeed_core.commands.serving import (
    BadRequestError,
    ChatTemplate,
    InputProcessor,
    TemplateError,
    read_ids,
)
from tokenspeed_server.access import current_tenant
from tokenspeed_server.continuation import cut_at_mark, mark_end
from tokenspeed_server.protocol import ChatRequest, FunctionSpec, Message, ToolCall, ToolSpec

MAX_PROMPTS = 512


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


def chat_ids(
    inputs: InputProcessor,
    request: ChatRequest,
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    add_special_tokens: bool = False,
    must_fit: bool = True,
) -> I32:
    """Render and encode a chat, with `tools` as the user wrote them.

    Raises BadRequestError for messages that the template rejects.
    """
    template = inputs.template
    if request.continue_final_message and request.add_generation_prompt:
        raise BadRequestError(
            "continue_final_message needs add_generation_prompt to be false",
            "continue_final_message",
        )
    options = {
        **effort_options(request.reasoning_effort, template),
        **request.chat_template_kwargs,
    }
    messages = [_for_template(message, template) for message in request.messages]
    if request.continue_final_message:
        mark_end(messages)
    used_tools = tools if request.tool_choice != "none" else None
    try:
        text = inputs.render(
            messages, used_tools, options, add_generation_prompt=request.add_generation_prompt
        )
    except TemplateError as error:
        raise BadRequestError(str(error), "messages") from error
    return inputs.encode_text(
        cut_at_mark(text) if request.continue_final_message else text,
        param="messages",
        must_fit=must_fit,
        add_special_tokens=add_special_tokens,
        salt=f"{current_tenant()}\0{request.cache_salt}",
    ).token_ids


def effort_options(effort: str | None, template: ChatTemplate) -> dict[str, Any]:
    """Return the variables of a template that an effort sets; "none" turns thinking off."""
    if effort is None:
        return {}
    values: dict[str, Any] = {"reasoning_effort": effort}
    if effort == "none":
        values |= {"enable_thinking": False, "thinking": False}
    return {name: value for name, value in values.items() if name in template.options}


def known_parts(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools as they were sent, in their order, but without fields that are not for the prompt.

    These are ignored fields, and `strict`, which is for the server.
    """
    function_fields = FunctionSpec.model_fields.keys() - {"strict"}
    return [
        {
            key: _pick(value, function_fields) if key == "function" else value
            for key, value in tool.items()
            if key in ToolSpec.model_fields
        }
        for tool in tools
    ]


def _pick(value: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {key: each for key, each in value.items() if key in names}


def _for_template(message: Message, template: ChatTemplate) -> dict[str, Any]:
    """Return a message as templates expect it: content is one text, arguments are objects."""
    is_system = message.role == "developer" and not template.knows_developer
    rendered: dict[str, Any] = {"role": "system" if is_system else message.role}
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    if not content and message.refusal:
        content = message.refusal
    rendered["content"] = "" if content is None and not message.tool_calls else content
    if message.tool_calls:
        rendered["tool_calls"] = [_called(call) for call in message.tool_calls]
    reasoning = message.reasoning_content or message.reasoning
    for name, value in (
        ("name", message.name),
        ("tool_call_id", message.tool_call_id),
        ("reasoning_content", reasoning),
    ):
        if value is not None:
            rendered[name] = value
    return rendered


def _called(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _arguments(given: str | dict[str, Any]) -> str | dict[str, Any]:
    """Return the arguments of an earlier call as an object, if there is one in the text.

    A reply may have ended in the middle of its arguments. The server wrote that message, so it must accept
    it: the complete part is kept, or the text itself if the model wrote no object.
    """
    if isinstance(given, dict):
        return given
    try:
        value = pydantic_core.from_json(given or "{}", allow_partial="trailing-strings")
    except ValueError:
        return given
    return value if isinstance(value, dict) else given
