"""The OpenAPI description: request bodies and errors, which FastAPI cannot see in the routes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from pydantic import BaseModel

from tokenspeed_server.answers import ANSWERS

_ERRORS = {
    400: "a field is wrong, unknown or not supported",
    401: "missing or wrong API key",
    404: "no such model",
    413: "the body is too large",
    429: "the queue is full; see Retry-After",
    500: "the engine failed",
    503: "the server is starting, draining, or its engine is dead",
}


class ErrorBody(BaseModel):
    """An error. `param` is the wrong field, if there is one."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """An error in OpenAI's shape."""

    error: ErrorBody


class AnthropicErrorBody(BaseModel):
    """An error."""

    type: str
    message: str


class AnthropicError(BaseModel):
    """An error in Anthropic's shape."""

    type: str
    error: AnthropicErrorBody


Described = dict[int | str, dict[str, Any]]


def describe_answer(kind: type[BaseModel], *errors: int, error: str = "Error") -> Described:
    """Return the descriptions of an answer, and of error responses."""
    content = {"application/json": {"schema": _reference(kind.__name__)}}
    return {200: {"description": "the answer", "content": content}, **_describe(errors, error)}


def describe_errors(*statuses: int) -> Described:
    """Return the descriptions of error responses."""
    return _describe(statuses, "Error")


def _describe(statuses: Iterable[int], error: str) -> Described:
    content = {"application/json": {"schema": _reference(error)}}
    return {each: {"description": _ERRORS[each], "content": content} for each in statuses}


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def describe_body(kind: type[BaseModel]) -> dict[str, Any]:
    """Return the option of a route that describes the body that a dependency reads."""
    content = {"application/json": {"schema": _reference(kind.__name__)}}
    return {"requestBody": {"required": True, "content": content}}


def describe_generation(
    kind: type[BaseModel],
    answer: type[BaseModel],
    *,
    ending: str = "ends with [DONE]",
    error: str = "Error",
) -> dict[str, Any]:
    """Return the options of a generation route. `ending` describes its stream."""
    schema = _reference(answer.__name__)
    return {
        "response_class": Response,
        "openapi_extra": describe_body(kind),
        "responses": {
            200: {
                "description": f"the answer, or a stream of events that {ending}",
                "content": {"application/json": {"schema": schema}, "text/event-stream": {}},
            },
            **_describe((400, 401, 404, 413, 429, 500, 503), error),
        },
    }


def openapi(app: FastAPI, models: tuple[type[BaseModel], ...]) -> dict[str, Any]:
    """Return the description of the app's routes, with `models` for the bodies."""
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title, version=app.version, routes=app.routes, servers=app.servers
        )
        for operations in schema["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)  # wrong parameters are answered with 400
        components: dict[str, Any] = {}
        schema["components"] = {"schemas": components}
        described_models: tuple[type[BaseModel], ...] = (*models, *ANSWERS, Error, AnthropicError)
        for model in described_models:
            described = model.model_json_schema(ref_template="#/components/schemas/{model}")
            components.update(described.pop("$defs", {}))
            components[model.__name__] = described
        bearer = {"type": "http", "scheme": "bearer"}
        schema["components"]["securitySchemes"] = {"api_key": bearer}
        schema["security"] = [{"api_key": []}, {}]
        app.openapi_schema = schema
    return app.openapi_schema
