"""The bodies of all APIs: how they are parsed and checked, and which errors they raise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import pydantic_core
from pydantic import ConfigDict, ValidationError

from tokenspeed_core.commands.serving import BadRequestError
from tokenspeed_server.body_limits import check_keys, shown
from tokenspeed_server.body_part import BodyPart
from tokenspeed_server.unknown_fields import Policy, check_unknown, extra_fields

_MEDIA_PARTS = ("image_url", "image", "input_audio", "audio_url", "video_url", "video", "file")


def allow_null(schema: dict[str, Any]) -> None:
    """Let optional fields be null, which means the same as leaving them out."""
    required = schema.get("required", ())
    for name, field in schema["properties"].items():
        if name not in required and {"type": "null"} not in field.get("anyOf", ()):
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}]}


class ApiBody(BodyPart):
    """The body of a request of any API."""

    model_config = ConfigDict(json_schema_extra=allow_null)

    # Fields of the API that are not implemented. Each is accepted with null and with the listed values,
    # which ask for the server's default behavior.
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    def fields_without_effect(self) -> list[str]:
        """Return the fields that ask for something that this server does not have."""
        return []


R = TypeVar("R", bound=ApiBody)


@dataclass(frozen=True, slots=True)
class ParsedBody(Generic[R]):
    """A valid body, the JSON object that was sent, and the paths of its ignored fields."""

    body: R
    raw: dict[str, Any]
    ignored: tuple[str, ...] = ()


def parse_body(body: bytes, kind: type[R], unknown_fields: Policy = "warn") -> ParsedBody[R]:
    """Parse and check the body of a request.

    Raises BadRequestError that names the first wrong field, its value and its bound.
    """
    try:
        raw = pydantic_core.from_json(body)
    except ValueError as error:
        raise BadRequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise BadRequestError("the body must be a JSON object")
    check_keys(raw)
    given = {name: value for name, value in raw.items() if value is not None}
    _refuse_unsupported(given, kind)
    known = kind.model_fields.keys() | kind.unsupported.keys()
    extra = [(None, name, known) for name in given if name not in kind.model_fields]
    ignored = check_unknown(extra, unknown_fields)
    parsed = validate(kind, {k: v for k, v in given.items() if k in kind.model_fields})
    ignored += check_unknown(extra_fields(parsed), unknown_fields)
    return ParsedBody(parsed, raw, (*ignored, *parsed.fields_without_effect()))


def validate(kind: type[R], fields: dict[str, Any]) -> R:
    """Return a body with these fields. Raises BadRequestError that names the first wrong one."""
    try:
        return kind.model_validate(fields, strict=True)
    except ValidationError as error:
        raise _bad_field(error) from error


def _refuse_unsupported(given: dict[str, Any], kind: type[ApiBody]) -> None:
    """Remove unsupported fields that change nothing. Raises BadRequestError for others."""
    for name in [name for name in given if name in kind.unsupported]:
        if given.pop(name) not in kind.unsupported[name]:
            raise BadRequestError(f"{name} is not supported: omit it", name, "unsupported")


def _bad_field(error: ValidationError) -> BadRequestError:
    problems = error.errors(include_url=False, include_context=False)
    first = max(problems, key=lambda problem: len(problem["loc"]))
    steps = [
        part
        for part in first["loc"]
        if isinstance(part, int) or (part.isidentifier() and part != "str")
    ]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in steps)
    path = path.lstrip(".")[:200] or "body"
    if first["type"] == "missing":
        return BadRequestError(f"{path} is required", path)
    if path.endswith(".type") and first["input"] in _MEDIA_PARTS:
        return BadRequestError(
            f"{path}: {first['input']} is not supported: this model reads text only",
            path,
            "unsupported",
        )
    return BadRequestError(f"{path}: {first['msg']} (found {shown(first['input'])})", path)
