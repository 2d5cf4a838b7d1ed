"""A small client of OpenAI's API on the standard library."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

TIMEOUT = 600.0  # seconds without a byte
_SPACES = set(" \t\r\n")


class ServerError(Exception):
    """A server is unreachable or returned an error; `status` is the HTTP status, or 0."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class NoServerError(ServerError):
    """Nothing listens at the address."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer, or of the reasoning before it."""

    text: str
    is_reasoning: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """The server's token counts of an answer."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class ChatClient:
    """A client of the server at `base_url`, which may end in `/v1`."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        with_scheme = base_url if "://" in base_url else f"http://{base_url}"
        self.base_url = with_scheme.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def model(self) -> str:
        """Return the name of the first served model. Raises ServerError."""
        return str(self._models(TIMEOUT)[0]["id"])

    def is_tokenspeed(self, seconds: float) -> bool:
        """Return whether a TokenSpeed server answers within a time. Raises ServerError."""
        return self._models(seconds)[0].get("owned_by") == "tokenspeed"

    def stream(
        self, model: str, messages: list[dict[str, str]], options: dict[str, Any]
    ) -> Iterator[Delta | Usage]:
        """Yield the pieces of an answer, then its usage. Closing the iterator ends the request.

        Raises ServerError.
        """
        body = {
            "model": model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **options,
        }
        with self._open("/v1/chat/completions", body) as response:
            try:
                for line in response:
                    if not line.startswith(b"data:"):
                        continue
                    data = line.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    yield from _parts(json.loads(data))
            except (OSError, HTTPException) as error:
                raise ServerError(f"the connection was lost: {error}") from error
            except (ValueError, AttributeError, TypeError) as error:
                raise ServerError(
                    self._no_api("/v1/chat/completions", "unexpected events")
                ) from error
        raise ServerError("the server ended the answer early")

    def is_ready(self) -> bool:
        """Return whether `/ready` answers with 200."""
        try:
            with self._open("/ready"):
                return True
        except ServerError:
            return False

    def _models(self, seconds: float) -> list[dict[str, Any]]:
        with self._open("/v1/models", timeout=seconds) as response:
            body = response.read()
        try:
            models: list[dict[str, Any]] = json.loads(body)["data"]
            if not models:
                raise ServerError(f"{self.base_url} serves no model")
            str(models[0]["id"])
        except (ValueError, KeyError, TypeError) as error:
            raise ServerError(self._no_api("/v1/models", "an unexpected body")) from error
        return models

    def _open(
        self, path: str, body: dict[str, Any] | None = None, timeout: float = TIMEOUT
    ) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.base_url + path, data, self._headers)
            response = urllib.request.urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            with error:
                message = _message(error.read())
            if message:
                raise ServerError(f"{error.code} {message}", error.code) from error
            answer = f"{error.code} {error.reason}"
            raise ServerError(self._no_api(path, answer), error.code) from error
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            why = getattr(reason, "strerror", None) or reason
            raise NoServerError(
                f"no server at {self.base_url} ({why}). Start one with `tokenspeed serve`, or "
                "omit --url: `tokenspeed chat` then starts one."
            ) from error
        assert isinstance(response, HTTPResponse)
        return response

    def _no_api(self, path: str, answer: str) -> str:
        return f"{self.base_url} has no OpenAI API: {path} answers with {answer}"


def _parts(event: Any) -> Iterator[Delta | Usage]:
    """Yield the contents of an event of a stream."""
    if "error" in event:
        raise ServerError(str(event["error"].get("message", event["error"])))
    for choice in event.get("choices", ()):
        delta = choice.get("delta", {})
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
            yield Delta(reasoning, is_reasoning=True)
        if text := delta.get("content"):
            yield Delta(text)
    if usage := event.get("usage"):
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        yield Usage(usage["prompt_tokens"], cached, usage["completion_tokens"])


def _message(body: bytes) -> str:
    """Return the message of an error body, "" if the body has another form."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def is_address(text: str) -> bool:
    """Return whether a text is an HTTP address, with or without the scheme."""
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        is_whole = bool(parts.hostname) and parts.port != 0
        return parts.scheme in ("http", "https") and is_whole and not set(text) & _SPACES
    except ValueError:
        return False
