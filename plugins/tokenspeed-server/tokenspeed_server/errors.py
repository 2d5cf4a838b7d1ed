"""Errors in the shape that OpenAI's clients read."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tokenspeed_core.commands.serving import RequestFailedError, TokenSpeedError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    403: "permission_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    504: "timeout_error",
    503: "service_unavailable_error",
}


class ApiError(TokenSpeedError):
    """A request that is answered with a status other than 200."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @classmethod
    def of(cls, error: RequestFailedError, grammar_field: str | None = None) -> ApiError:
        """Return the HTTP error for a request that the engine rejected or could not finish.

        `grammar_field` is the field of the request that its grammar comes from.
        """
        message = str(error)
        match error.reason:
            case "queue_full":
                return cls(429, message, code="queue_full", headers={"retry-after": "1"})
            case "tenant_limit":
                headers = {"retry-after": "1"}
                return cls(429, message, code="rate_limit_exceeded", headers=headers)
            case "draining":
                return cls(503, message, code="draining", headers={"retry-after": "5"})
            case "engine_dead":
                return cls(500, message, code="engine_dead")
            case "stopped":
                return cls(503, message, code="stopped")
            case "unavailable":
                return cls(503, message, code="unavailable", headers={"retry-after": "1"})
            case "internal":
                return cls(500, message)
            case "too_long":
                return cls(400, message, code="context_length_exceeded")
            case "bad_grammar":
                return cls(400, message, grammar_field)
            case _:
                return cls(400, message)

    def body(self) -> bytes:
        """Return the error as a JSON object."""
        error = {
            "message": self.message,
            "type": _TYPES.get(self.status, "invalid_request_error"),
            "param": self.param,
            "code": self.code,
        }
        return json.dumps({"error": error}).encode()


def model_not_found(asked: str, available: str) -> ApiError:
    """Return the error for a request that names another model than the served one."""
    return ApiError(
        404,
        f"the model {asked!r} does not exist; available: {available!r}",
        "model",
        "model_not_found",
    )
