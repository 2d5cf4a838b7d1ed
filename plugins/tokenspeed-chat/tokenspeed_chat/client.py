"""The little of an OpenAI client that a terminal chat needs, on the standard library alone."""

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


class Unreachable(Exception):
    """A server that cannot be reached, or that refused; the message says what it said."""


class ChatClient:
    """Talks to the server at `base_url`, with or without its `/v1`."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        with_scheme = base_url if "://" in base_url else f"http://{base_url}"
        self.base_url = with_scheme.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def model(self) -> str:
        """Return the name of the first model served. Raises Unreachable."""
        with self._open("/v1/models") as response:
            body = response.read()
        try:
            models = [str(each["id"]) for each in json.loads(body)["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise Unreachable(f"{self._no_api('/v1/models')} with something else") from error
        if not models:
            raise Unreachable(f"{self.base_url} serves no model")
        return models[0]

    def stream(
        self, model: str, messages: list[dict[str, str]], options: dict[str, Any]
    ) -> Iterator[str]:
        """Yield the text of the answer as it comes. Closing it ends the request. Raises Unreachable."""
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
                raise Unreachable(f"the server went away: {error}") from error
            except (ValueError, AttributeError, TypeError) as error:
                raise Unreachable(
                    f"{self._no_api('/v1/chat/completions')} with events of another form"
                ) from error
        raise Unreachable("the server ended the answer early")

    def is_healthy(self) -> bool:
        """Say whether `/health` answers with 200."""
        try:
            with self._open("/health"):
                return True
        except Unreachable:
            return False

    def _open(self, path: str, body: dict[str, Any] | None = None) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.base_url + path, data, self._headers)
            response = urllib.request.urlopen(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            with error:
                told = _message(error.read())
            said = (
                f"{error.code} {told}"
                if told
                else f"{self._no_api(path)} {error.code} {error.reason}"
            )
            raise Unreachable(said) from error
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            why = getattr(reason, "strerror", None) or reason
            raise Unreachable(
                f"no server at {self.base_url} ({why}); start one with `tokenspeed serve`, or leave out --base-url: "
                "`tokenspeed chat` starts its own"
            ) from error
        assert isinstance(response, HTTPResponse)
        return response

    def _no_api(self, path: str) -> str:
        return f"{self.base_url} has no OpenAI API: {path} answers"


def _text(event: Any) -> Iterator[str]:
    if "error" in event:
        raise Unreachable(str(event["error"].get("message", event["error"])))
    for choice in event.get("choices", ()):
        text = choice.get("delta", {}).get("content")
        if text:
            yield text


def _message(body: bytes) -> str:
    """Return what an API says of a refusal, "" where the body is of another form."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def is_address(text: str) -> bool:
    """Say whether a text is the http address of a server, with or without the scheme."""
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        is_whole = bool(parts.hostname) and parts.port != 0
        return parts.scheme in ("http", "https") and is_whole and not set(text) & _SPACES
    except ValueError:
        return False
