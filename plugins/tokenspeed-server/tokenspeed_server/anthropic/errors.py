"""Errors in the shape that Anthropic's clients read."""

from __future__ import annotations

import json

from tokenspeed_server.errors import ApiError

PATHS = ("/v1/messages", "/v1/messages/count_tokens")

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ApiError) -> bytes:
    """Return the error as a JSON object."""
    kind = _TYPES.get(error.status, "invalid_request_error")
    return json.dumps({"type": "error", "error": {"type": kind, "message": error.message}}).encode()
