"""A small client of OpenAI's API on the standard library."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

TIMEOUT = 600.0  # seconds without a byte
_SPACES = set(" \t\r\n")


class ServerError(Exception):
    """A server that cannot be reached or answers with an error."""


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
        with self._open("/v1/models") as response:
            body = response.read()
        try:
            models = [str(each["id"]) for each in json.loads(body)["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ServerError(self._no_api("/v1/models", "an unexpected body")) from error
        if not models:
            raise ServerError(f"{self.base_url} serves no model")
        return models[0]

    def stream(
        self, model: str, messages: list[dict[str, str]], options: dict[str, Any]
    ) -> Iterator[str]:
        """Yield the text of an answer. Closing the iterator ends the request. Raises ServerError."""
        body = {"model": model, "messages": messages, "stream": True, **options}
        with self._open("/v1/chat/completions", body) as response:
            try:
                for line in response:
                    if not line.startswith(b"data:"):
                        continue
                    data = line.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    yield from _text(json.loads(data))
            except (OSError, HTTPException) as error:
                raise ServerError(f"the connection was lost: {error}") from error
            except (ValueError, AttributeError, TypeError) as error:
                raise ServerError(
                    self._no_api("/v1/chat/completions", "unexpected events")
                ) from error
        raise ServerError("the server ended the answer early")

    def is_healthy(self) -> bool:
        """Return whether `/health` answers with 200."""
        try:
            with self._open("/health"):
                return True
        except ServerError:
            return False

    def _open(self, path: str, body: dict[str, Any] | None = None) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.base_url + path, data, self._headers)
            response = urllib.request.urlopen(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            with error:
                message = _message(error.read())
            if message:
                raise ServerError(f"{error.code} {message}") from error
            raise ServerError(self._no_api(path, f"{error.code} {error.reason}")) from error
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            why = getattr(reason, "strerror", None) or reason
            raise ServerError(
                f"no server at {self.base_url} ({why}). Start one with `tokenspeed serve`, or "
                "omit --base-url: `tokenspeed chat` then starts one."
            ) from error
        assert isinstance(response, HTTPResponse)
        return response

    def _no_api(self, path: str, answer: str) -> str:
        return f"{self.base_url} has no OpenAI API: {path} answers with {answer}"


def _text(event: Any) -> Iterator[str]:
    if "error" in event:
        raise ServerError(str(event["error"].get("message", event["error"])))
    for choice in event.get("choices", ()):
        text = choice.get("delta", {}).get("content")
        if text:
            yield text


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
