"""The routes /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from pydantic import Field, WithJsonSchema
from starlette.datastructures import Headers

from tokenspeed_core.commands.serving import BadRequestError, Tokenizer, check_ids, read_ids
from tokenspeed_server.admission import computed, computed_answer
from tokenspeed_server.answers import DetokenizeAnswer, TokenizeAnswer
from tokenspeed_server.api_body import ApiBody, parse_body
from tokenspeed_server.errors import model_not_found
from tokenspeed_server.openapi import describe_answer, describe_body
from tokenspeed_server.prompts import chat_ids, known_parts
from tokenspeed_server.protocol import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatRequest,
    Identifier,
    Message,
    ToolSpec,
)
from tokenspeed_server.service import Service

_IDS_SCHEMA = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}

router = APIRouter()


class TokenizeRequest(ApiBody):
    """The body of /tokenize: either `prompt` or `messages`."""

    model: Identifier | None = Field(None, description="default: the served model")
    prompt: str | None = None
    messages: list[Message] | None = Field(
        None, min_length=1, max_length=MAX_MESSAGES, fail_fast=True
    )
    tools: Annotated[list[ToolSpec], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, max_length=64)
    add_special_tokens: bool | None = Field(
        None, description="default: true for a prompt; false for messages, as templates add them"
    )
    add_generation_prompt: bool = Field(
        True, description="whether rendered messages end with the start of the assistant's answer"
    )
    continue_final_message: bool = Field(
        False, description="whether the prompt ends with the text of the last message"
    )
    return_token_strs: bool = Field(False, description="return the text of each token too")


class DetokenizeRequest(ApiBody):
    """The body of /detokenize."""

    model: Identifier | None = Field(None, description="default: the served model")
    # May be long: `read_ids` checks it in one pass.
    tokens: Annotated[Any, WithJsonSchema(_IDS_SCHEMA)]


BODIES = (TokenizeRequest, DetokenizeRequest)


def _tokenize(service: Service, data: bytes, headers: Headers) -> JSONResponse:
    parsed = parse_body(data, TokenizeRequest, service.options.unknown_fields)
    body = parsed.body
    _check_model(body.model, service)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequestError("send either prompt or messages", "prompt")
    inputs = service.inputs
    if body.prompt is not None:
        specials = body.add_special_tokens is not False
        # Clients count the tokens of texts that are longer than the context, too.
        ids = inputs.encode_text(body.prompt, add_special_tokens=specials, must_fit=False).token_ids
    else:
        chat = ChatRequest.model_construct(
            messages=body.messages or [],
            chat_template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )
        ids = chat_ids(
            inputs,
            chat,
            known_parts(parsed.raw.get("tools") or ()) or None,
            add_special_tokens=body.add_special_tokens is True,
            must_fit=False,
        )
    tokens = ids.tolist()
    answer = {"count": len(tokens), "max_model_len": inputs.limits.longest, "tokens": tokens}
    if body.return_token_strs:
        tokenizer = _tokenizer(service)
        answer["token_strs"] = [
            tokenizer.token_bytes(token).decode(errors="replace") for token in tokens
        ]
    return computed_answer(service, answer, parsed.ignored)


def _detokenize(service: Service, data: bytes, headers: Headers) -> JSONResponse:
    parsed = parse_body(data, DetokenizeRequest, service.options.unknown_fields)
    body = parsed.body
    _check_model(body.model, service)
    tokenizer = _tokenizer(service)
    ids = read_ids(body.tokens, "tokens")
    check_ids(ids, service.inputs.limits, "tokens")
    text = tokenizer.decode(ids, skip_special_tokens=False)
    return computed_answer(service, {"prompt": text}, parsed.ignored)


def _check_model(model: str | None, service: Service) -> None:
    if model not in (None, service.options.model_name):
        raise model_not_found(str(model), service.options.model_name)


def _tokenizer(service: Service) -> Tokenizer:
    tokenizer = service.inputs.text.tokenizer
    if tokenizer is None:
        raise BadRequestError("this server runs with --skip-tokenizer-init: it has no tokenizer")
    return tokenizer


_ERRORS = (400, 401, 404, 413, 503)


@router.post(
    "/tokenize",
    openapi_extra=describe_body(TokenizeRequest),
    responses=describe_answer(TokenizeAnswer, *_ERRORS),
)
async def tokenize(response: Annotated[JSONResponse, Depends(computed(_tokenize))]) -> JSONResponse:
    """Return the token ids of a prompt, or of messages rendered by the model's template."""
    return response


@router.post(
    "/detokenize",
    openapi_extra=describe_body(DetokenizeRequest),
    responses=describe_answer(DetokenizeAnswer, *_ERRORS),
)
async def detokenize(
    response: Annotated[JSONResponse, Depends(computed(_detokenize))],
) -> JSONResponse:
    """Return the text of token ids, with special tokens."""
    return response
