"""The routes of the Responses API."""

from __future__ import annotations

import json
import uuid
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers

from tokenspeed_core.commands.serving import BadRequestError, Tokenizer
from tokenspeed_server.access import current_tenant
from tokenspeed_server.admission import admitted, get_service
from tokenspeed_server.answers import DeletedResponse, InputItems, ResponsesAnswer
from tokenspeed_server.api_body import parse_body
from tokenspeed_server.errors import ApiError
from tokenspeed_server.formats import Usage
from tokenspeed_server.generation import ParsedRequest, prepare
from tokenspeed_server.generation_response import GenerationResponse
from tokenspeed_server.openapi import describe_answer, describe_errors, describe_generation
from tokenspeed_server.prompts import known_parts
from tokenspeed_server.responses_api.format import ResponsesFormat
from tokenspeed_server.responses_api.protocol import (
    Item,
    Items,
    MessageItem,
    ResponsesRequest,
)
from tokenspeed_server.responses_api.store import StoredResponse
from tokenspeed_server.responses_api.translate import to_chat, tools_of
from tokenspeed_server.service import Service

FIELDS_OF_CHAT = {"response_format": "text.format"}
MAX_PREVIOUS = 4096  # responses in one conversation

router = APIRouter()


def _parse(service: Service, data: bytes, headers: Headers) -> ParsedRequest:
    parsed = parse_body(data, ResponsesRequest, service.options.unknown_fields)
    body, owner = parsed.body, current_tenant()
    given = _items(body.input)
    items = [*_conversation(service, owner, body.previous_response_id), *given]
    if not items:
        raise BadRequestError("input has no items", "input")
    chat = to_chat(body, items)
    response_id = f"resp_{uuid.uuid4().hex}"

    def make_format(model: str, tokenizer: Tokenizer | None, usage: Usage) -> ResponsesFormat:
        return ResponsesFormat(response_id, body, model, tokenizer, usage, finish)

    store, previous = service.response_store, body.previous_response_id
    kept = store.encode([_stored(item) for item in given]) if body.store else b""

    def finish(response: bytes) -> None:
        if body.store:
            store.put(owner, response_id, StoredResponse(previous, kept, response))

    tools = known_parts(tools_of(body.tools))
    return prepare(
        service, chat, tools, make_format, ignored=parsed.ignored, renamed=FIELDS_OF_CHAT
    )


@router.post(
    "/v1/responses",
    **describe_generation(ResponsesRequest, ResponsesAnswer, ending="ends with response.completed"),
)
async def create_response(
    response: Annotated[GenerationResponse, Depends(admitted(_parse))],
) -> Response:
    """Answer a conversation of items, and store the answer unless `store` is false."""
    return response


@router.get(
    "/v1/responses/{response_id}", responses=describe_answer(ResponsesAnswer, 400, 401, 404)
)
async def get_response(request: Request, response_id: str, stream: bool = False) -> Response:
    """Return a stored response."""
    if stream:
        raise BadRequestError(
            "a stored response cannot be streamed: omit stream", "stream", "unsupported"
        )
    stored = await _find(request, response_id)
    return Response(stored.response, media_type="application/json")


@router.delete("/v1/responses/{response_id}", responses=describe_answer(DeletedResponse, 401, 404))
async def delete_response(request: Request, response_id: str) -> JSONResponse:
    """Delete a stored response. Later responses that continue it can no longer be continued."""
    service = get_service(request)
    owner = current_tenant()
    delete = service.response_store.delete
    if not await service.engine.in_thread(delete, owner, response_id):
        raise _not_found(response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel", responses=describe_errors(400, 401, 404))
async def cancel_response(request: Request, response_id: str) -> Response:
    """Refuse to cancel a response: only background responses can be cancelled, and there are none."""
    await _find(request, response_id)
    raise BadRequestError(
        "only background responses can be cancelled; close the connection to cancel this one",
        "response_id",
    )


@router.get(
    "/v1/responses/{response_id}/input_items", responses=describe_answer(InputItems, 400, 401, 404)
)
async def list_input_items(
    request: Request,
    response_id: str,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> JSONResponse:
    """List the input items of a stored response, without those of the responses before it."""
    items: list[dict[str, Any]] = json.loads((await _find(request, response_id)).input)
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise BadRequestError(f"no input item {after!r}", "after")
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + limit]
    return JSONResponse(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": start + limit < len(items),
        }
    )


def _items(given: str | list[Item]) -> list[Item]:
    return [MessageItem(role="user", content=given)] if isinstance(given, str) else given


def _conversation(service: Service, owner: str, previous: str | None) -> list[Item]:
    """Return the items of the responses that a request continues. Raises ApiError (400)."""
    parts: list[list[Any]] = []
    last = previous
    while last is not None:
        stored = service.response_store.get(owner, last)
        if stored is None or len(parts) > MAX_PREVIOUS:
            raise ApiError(
                400,
                f"the response {last!r}"
                + ("" if last == previous else f", an earlier part of {previous!r},")
                + " is not stored: it was deleted, dropped for newer ones, or sent with store=false",
                "previous_response_id",
                "previous_response_not_found",
            )
        parts.append(json.loads(stored.input) + json.loads(stored.response)["output"])
        last = stored.previous
    return Items.validate_python([item for part in reversed(parts) for item in part])


def _stored(item: Item) -> dict[str, Any]:
    """Return an input item with an id, as in the list of items."""
    fields: dict[str, Any] = item.model_dump(exclude_none=True)
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        fields["content"] = [{"type": kind, "text": item.content}]
    fields.setdefault("id", f"item_{uuid.uuid4().hex}")
    return fields


async def _find(request: Request, response_id: str) -> StoredResponse:
    """Return a stored response. Raises ApiError (404)."""
    service = get_service(request)
    owner = current_tenant()
    stored = await service.engine.in_thread(service.response_store.get, owner, response_id)
    if stored is None:
        raise _not_found(response_id)
    return stored


def _not_found(response_id: str) -> ApiError:
    return ApiError(404, f"no stored response {response_id!r}", "response_id", "not_found")
