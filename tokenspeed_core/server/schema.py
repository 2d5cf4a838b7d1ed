"""The OpenAPI description of the routes that FastAPI does not see."""

from __future__ import annotations

from typing import Any

import fastapi
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from tokenspeed_core.sampling import SamplingParams
from tokenspeed_core.server.protocol import ChatLimits, ChatLogprobs, ChatRequest, CompletionRequest

_PROMPT = {
    "description": "text, token ids, or a list of either",
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        {
            "type": "array", "minItems": 1,
            "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        },
    ],
}
_ERRORS = {
    "400": "a field is wrong, unknown or not supported", "401": "missing or wrong key",
    "404": "no such model", "413": "the body is too large", "429": "the queue is full; see Retry-After",
    "500": "the engine failed", "503": "starting, draining or dead",
}


def add_generating_routes(app: fastapi.FastAPI) -> None:
    """Make the application's description include the completion routes."""

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            components = schema.setdefault("components", {}).setdefault("schemas", {})
            completion = _merged(components, "CompletionRequest", CompletionRequest, SamplingParams)
            completion["properties"]["prompt"] = _PROMPT
            chat = _merged(components, "ChatRequest", ChatRequest, SamplingParams, ChatLogprobs, ChatLimits)
            for path, name in (("/v1/completions", completion), ("/v1/chat/completions", chat)):
                schema["paths"][path] = {"post": _operation(path, name["title"])}
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]


def _merged(components: dict[str, Any], name: str, *kinds: type[BaseModel]) -> dict[str, Any]:
    """Add the schema of a body that is read by several models; later ones win."""
    merged: dict[str, Any] = {
        "type": "object", "title": name, "properties": {}, "required": [], "additionalProperties": False
    }
    for kind in kinds:
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        components.update(schema.get("$defs", {}))
        merged["properties"].update(schema["properties"])
        merged["required"] += schema.get("required", [])
    stop = merged["properties"]["stop"]
    merged["properties"]["stop"] = {"anyOf": [dict(stop["items"]), stop]}
    for field, schema in merged["properties"].items():
        if field not in merged["required"]:  # null is a field left out
            merged["properties"][field] = {"anyOf": [schema, {"type": "null"}]}
    components[name] = merged
    return merged


def _operation(path: str, name: str) -> dict[str, Any]:
    body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    answers: dict[str, Any] = {"200": {
        "description": "the answer, or a stream of events ending in [DONE]",
        "content": {"application/json": {}, "text/event-stream": {}},
    }}
    answers |= {
        status: {"description": text, "content": {"application/json": {}}} for status, text in _ERRORS.items()
    }
    return {"summary": path, "requestBody": {"required": True, "content": body}, "responses": answers}
