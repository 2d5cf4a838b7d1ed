"""The routes of OpenAI's completions and chats, and those that describe the server."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers

import tokenspeed_core
from tokenspeed_server.admission import admitted, get_service
from tokenspeed_server.answers import (
    ChatAnswer,
    CompletionAnswer,
    ModelAnswer,
    ModelList,
    Plugins,
    Status,
    Version,
)
from tokenspeed_server.errors import model_not_found
from tokenspeed_server.generation import Body, ParsedRequest, parse_request
from tokenspeed_server.generation_response import GenerationResponse
from tokenspeed_server.openapi import describe_answer, describe_generation
from tokenspeed_server.protocol import ChatRequest, CompletionRequest
from tokenspeed_server.service import Service

_STATUS = describe_answer(Status)
_STATUS[503] = {**_STATUS[200], "description": "unavailable, with the reason"}

router = APIRouter()


def _parse(kind: type[Body], service: Service, data: bytes, headers: Headers) -> ParsedRequest:
    return parse_request(service, kind, data)


@router.post("/v1/completions", **describe_generation(CompletionRequest, CompletionAnswer))
async def create_completion(
    response: Annotated[GenerationResponse, Depends(admitted(partial(_parse, CompletionRequest)))],
) -> Response:
    """Complete a prompt: text, token ids, or a list of either."""
    return response


@router.post("/v1/chat/completions", **describe_generation(ChatRequest, ChatAnswer))
async def create_chat_completion(
    response: Annotated[GenerationResponse, Depends(admitted(partial(_parse, ChatRequest)))],
) -> Response:
    """Answer a chat, rendered by the model's template."""
    return response


@router.get("/health", responses=_STATUS)
@router.head("/health", include_in_schema=False)
async def health(request: Request) -> JSONResponse:
    """Report whether the server is alive: its engine is neither dead nor stuck. Needs no API key."""
    return _health("ok", get_service(request).why_not_alive())


@router.get("/ready", responses=_STATUS)
@router.head("/ready", include_in_schema=False)
async def ready(request: Request) -> JSONResponse:
    """Report whether the server accepts requests. Needs no API key."""
    return _health("ready", get_service(request).why_not_ready())


@router.get("/version", responses=describe_answer(Version, 401))
async def version() -> JSONResponse:
    """Return the server's version."""
    return JSONResponse({"version": tokenspeed_core.__version__})


@router.get("/v1/models", responses=describe_answer(ModelList, 401))
async def list_models(request: Request) -> JSONResponse:
    """List the served model."""
    model = _model(get_service(request))
    page = {"first_id": model["id"], "last_id": model["id"], "has_more": False}  # for Anthropic's
    return JSONResponse({"object": "list", "data": [model], **page})


@router.get("/v1/models/{model_id:path}", responses=describe_answer(ModelAnswer, 401, 404))
async def get_model(request: Request, model_id: str) -> JSONResponse:
    """Return the served model and its context length."""
    service = get_service(request)
    if model_id != service.options.model_name:
        raise model_not_found(model_id, service.options.model_name)
    return JSONResponse(_model(service))


@router.get("/v1/plugins", responses=describe_answer(Plugins, 401, 503))
async def list_plugins(request: Request) -> Response:
    """Return the plugins and kernels in use, with the reasons."""
    service = get_service(request)
    report = json.loads(service.inputs.limits.report)
    return JSONResponse({"model": service.options.model_name, **report})


def _health(status: str, reason: str | None) -> JSONResponse:
    if reason is None:
        return JSONResponse({"status": status})
    return JSONResponse({"status": "unavailable", "reason": reason}, 503)


def _model(service: Service) -> dict[str, Any]:
    """Return the model with the fields that clients of OpenAI, vLLM and Anthropic read."""
    return {
        "id": service.options.model_name,
        "object": "model",
        "created": service.options.created,
        "owned_by": "tokenspeed",
        "max_model_len": service.inputs.limits.longest if service.engine.is_open else None,
        "type": "model",
        "display_name": service.options.model_name,
        "created_at": datetime.fromtimestamp(service.options.created, UTC).isoformat(),
    }
