"""The command: it chooses the server, then prints one answer or holds a conversation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from tokenspeed_server.settings import ServerConfig

from tokenspeed_chat.client import ChatClient, NoServerError, ServerError, is_address
from tokenspeed_chat.conversation import Conversation, converse
from tokenspeed_chat.screen import Screen
from tokenspeed_core import TokenSpeedError
from tokenspeed_core.commands.settings import ConfigFile, configure, key_for_server

PROBE_SECONDS = 2.0  # that a server at the default address may take to list its model
ADDRESS_SETTINGS = {"host", "port", "api_key"}  # which find a server; all others start one


class ChatError(TokenSpeedError):
    """A conversation that is not possible."""


def talk(
    *,
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT")] = None,
    url: Annotated[str | None, typer.Option("--url", help="a running server")] = None,
    system: Annotated[str | None, typer.Option("--system", help="the system message")] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0, help="0 is greedy")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="maximum length of an answer")
    ] = None,
    config: ConfigFile = None,
    flags: dict[str, Any],
) -> int:
    """Answer PROMPT or the text of a pipe, or chat until Ctrl-D; return the exit status."""
    given = {"temperature": temperature, "max_tokens": max_tokens}
    options = {name: value for name, value in given.items() if value is not None}
    settings = (
        configure(ServerConfig, None, flags, config) if url is None else _check(url, config, flags)
    )
    question = _question(prompt)
    screen = Screen()
    with _server(url, settings, screen) as client:
        try:
            conversation = Conversation(client, client.model(), system, options)
            if question is None:
                return converse(conversation, screen)
            conversation.answer(question, screen)
        except ServerError as error:
            hint = ": pass --api-key or set TOKENSPEED_API_KEY" if error.status == 401 else ""
            raise ChatError(f"{error}{hint}") from error
        except KeyboardInterrupt:
            return 130
    return 0


def _question(prompt: str | None) -> str | None:
    """Return the prompt and the text of a pipe, joined; None for a conversation."""
    piped = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read().strip()
    parts = [part for part in (prompt, piped) if part]
    if parts:
        return "\n\n".join(parts)
    if prompt is None and sys.stdin is not None and sys.stdin.isatty():
        return None
    raise ChatError("the prompt is empty: pass PROMPT, or pipe text to the command")


def _check(url: str, file: str | None, flags: dict[str, Any]) -> ServerConfig:
    """Return the settings for a running server: its key. Raises ChatError for others."""
    if file is not None or set(flags) - {"api_key"}:
        raise ChatError("--url uses a running server: remove the other settings")
    if not is_address(url):
        raise ChatError(
            f"--url {url!r}: not an HTTP address; pass one such as http://127.0.0.1:8000"
        )
    key = key_for_server(flags.get("api_key"))
    return ServerConfig.from_keywords(**({"api_key": key} if key else {}))


@contextmanager
def _server(url: str | None, settings: ServerConfig, screen: Screen) -> Iterator[ChatClient]:
    """Yield a client of the server at `url`, of a running server, or of a server that this command starts."""
    if url is not None:
        yield ChatClient(url, key_for_server(settings.api_key))
        return
    running = _running(settings)
    if running is not None:
        yield running
        return
    from tokenspeed_chat.server import started_server

    with started_server(settings, screen) as started:
        yield ChatClient(started, key_for_server(settings.api_key))


def _running(settings: ServerConfig) -> ChatClient | None:
    """Return a client of the TokenSpeed server at the configured address, if nothing else was set.

    Raises ChatError if a server there refuses the key.
    """
    if settings.model_fields_set - ADDRESS_SETTINGS:
        return None
    client = ChatClient(f"http://{settings.host}:{settings.port}", key_for_server(settings.api_key))
    try:
        return client if client.is_tokenspeed(PROBE_SECONDS) else None
    except NoServerError:
        return None
    except ServerError as error:
        if error.status == 401:
            raise ChatError(
                f"the server at {client.base_url} needs an API key: set TOKENSPEED_API_KEY, or "
                "start another server with --port"
            ) from error
        return None
