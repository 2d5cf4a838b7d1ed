"""The routes of the Messages API."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers

from tokenspeed_core.commands.serving import Tokenizer
from tokenspeed_server.admission import admitted, computed, computed_answer
from tokenspeed_server.answers import MessagesAnswer, TokenCount
from tokenspeed_server.anthropic.format import MessagesFormat
from tokenspeed_server.anthropic.protocol import CountTokensRequest, MessagesRequest
from tokenspeed_server.anthropic.translate import to_chat, tools_of
from tokenspeed_server.api_body import parse_body
from tokenspeed_server.formats import Usage
from tokenspeed_server.generation import ParsedRequest, prepare
from tokenspeed_server.generation_response import GenerationResponse
from tokenspeed_server.openapi import describe_answer, describe_body, describe_generation
from tokenspeed_server.prompts import known_parts
from tokenspeed_server.service import Service

router = APIRouter()


def _parse(service: Service, data: bytes, headers: Headers) -> ParsedRequest:
    parsed = parse_body(data, MessagesRequest, service.options.unknown_fields)
    body = parsed.body
    hides_thinking = body.thinking is not None and body.thinking.display == "omitted"

    def make_format(model: str, tokenizer: Tokenizer | None, usage: Usage) -> MessagesFormat:
        return MessagesFormat(model, hides_thinking=hides_thinking)

    chat = to_chat(body, service.inputs.text.template)
    return prepare(
        service, chat, known_parts(tools_of(body.tools)), make_format, ignored=parsed.ignored
    )


def _count(service: Service, data: bytes, headers: Headers) -> JSONResponse:
    parsed = parse_body(data, CountTokensRequest, service.options.unknown_fields)
    body = parsed.body
    chat = to_chat(body, service.inputs.text.template)
    request = prepare(service, chat, known_parts(tools_of(body.tools)), _no_format)
    count = sum(map(len, request.prompts))
    return computed_answer(service, {"input_tokens": count}, parsed.ignored)


def _no_format(model: str, tokenizer: Tokenizer | None, usage: Usage) -> MessagesFormat:
    raise AssertionError("count_tokens generates no answer")


@router.post(
    "/v1/messages",
    **describe_generation(
        MessagesRequest, MessagesAnswer, ending="ends with message_stop", error="AnthropicError"
    ),
)
async def create_message(
    response: Annotated[GenerationResponse, Depends(admitted(_parse))],
) -> Response:
    """Answer a conversation, as Anthropic's Messages API does."""
    return response


@router.post(
    "/v1/messages/count_tokens",
    openapi_extra=describe_body(CountTokensRequest),
    responses=describe_answer(TokenCount, 400, 401, 404, 413, 503, error="AnthropicError"),
)
async def count_tokens(
    response: Annotated[JSONResponse, Depends(computed(_count))],
) -> JSONResponse:
    """Count the tokens of a conversation's prompt."""
    return response
