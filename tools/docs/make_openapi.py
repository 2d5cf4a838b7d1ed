"""Write tokenspeed_core/server/openapi.json: what the server says of its routes at /openapi.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from tokenspeed_server.protocol import ChatNames, ChatRequest, CompletionRequest

import tokenspeed_core
from tokenspeed_core.api.sampling import SamplingParams

PATH = Path(__file__).parents[2] / "plugins/tokenspeed-server/tokenspeed_server/openapi.json"
PROMPT = {
    "description": "text, token ids, or a list of either",
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        {
            "type": "array",
            "minItems": 1,
            "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        },
    ],
}
ERRORS = {
    "400": "a field is wrong, unknown or not supported",
    "401": "missing or wrong key",
    "404": "no such model",
    "413": "the body is too large",
    "429": "the queue is full; see Retry-After",
    "500": "the engine failed",
    "503": "starting, draining or dead",
}
TELLING = {
    "/health": ("whether requests should come here", {"503": "not ready, or stuck"}),
    "/version": ("the server's version", {}),
    "/v1/models": ("the served model", {}),
    "/v1/models/{model_id}": ("the served model", {"404": "no such model"}),
    "/v1/plugins": ("which plugins and kernels run, and why", {"503": "the engine is starting"}),
    "/openapi.json": ("this description", {}),
}


def description() -> dict[str, Any]:
    """Return the description of all routes."""
    components: dict[str, Any] = {}
    completion = merged(components, "CompletionRequest", CompletionRequest, SamplingParams)
    completion["properties"]["prompt"] = PROMPT
    merged(components, "ChatRequest", ChatRequest, SamplingParams, ChatNames)
    paths: dict[str, Any] = {path: {"get": telling(path, *each)} for path, each in TELLING.items()}
    for path, name in (
        ("/v1/completions", "CompletionRequest"),
        ("/v1/chat/completions", "ChatRequest"),
    ):
        paths[path] = {"post": generating(path, name)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "TokenSpeed", "version": tokenspeed_core.__version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def telling(path: str, summary: str, errors: dict[str, str]) -> dict[str, Any]:
    """Return the description of a route that generates nothing."""
    answers = {
        status: {"description": text, "content": {"application/json": {}}}
        for status, text in {"200": "the answer", "401": ERRORS["401"], **errors}.items()
    }
    parameter = {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "summary": summary,
        "parameters": [parameter] if "{" in path else [],
        "responses": answers,
    }


def merged(components: dict[str, Any], name: str, *kinds: type[BaseModel]) -> dict[str, Any]:
    """Add the schema of a body that is read by several models; later ones win."""
    merged: dict[str, Any] = {
        "type": "object",
        "title": name,
        "properties": {},
        "required": [],
        "additionalProperties": False,
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


def generating(path: str, name: str) -> dict[str, Any]:
    """Return the description of a route that generates."""
    body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    answers: dict[str, Any] = {
        "200": {
            "description": "the answer, or a stream of events ending in [DONE]",
            "content": {"application/json": {}, "text/event-stream": {}},
        }
    }
    answers |= {
        status: {"description": text, "content": {"application/json": {}}}
        for status, text in ERRORS.items()
    }
    return {
        "summary": path,
        "requestBody": {"required": True, "content": body},
        "responses": answers,
    }


def text() -> str:
    """Return the file's text."""
    return json.dumps(description(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
