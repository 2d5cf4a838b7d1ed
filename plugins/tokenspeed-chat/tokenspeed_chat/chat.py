"""The conversation: turns of a user, or lines of a pipe."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from tokenspeed_chat.client import ChatClient, ServerError, is_address
from tokenspeed_core import TokenSpeedError
from tokenspeed_core.commands.settings import ConfigFile, ModelArgument, configure


class ChatError(TokenSpeedError):
    """A conversation that is not possible."""


def talk(
    *,
    positional: ModelArgument = None,
    base_url: Annotated[str | None, typer.Option("--base-url", help="a running server")] = None,
    system: Annotated[str | None, typer.Option("--system", help="the system message")] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0, help="0 is greedy")
    ] = None,
    config: ConfigFile = None,
    flags: dict[str, Any],
) -> int:
    """Chat until Ctrl-D or the end of the pipe; return the exit status. Ctrl-C stops an answer."""
    options = {} if temperature is None else {"temperature": temperature}
    if base_url is not None:
        if positional is not None or config is not None or set(flags) - {"api_key"}:
            raise ChatError(
                "--base-url uses a running server: it cannot be combined with server settings"
            )
        if not is_address(base_url):
            raise ChatError(
                f"--base-url {base_url!r}: not an HTTP address; give one such as http://127.0.0.1:8000"
            )
        key = flags.get("api_key") or os.environ.get("TOKENSPEED_API_KEY")
        return _take_turns(ChatClient(base_url, key), system, options)
    resolved = configure(positional, flags, config)
    from tokenspeed_chat.server import started_server

    with started_server(resolved) as url:
        return _take_turns(ChatClient(url, resolved.api_key), system, options)


def _take_turns(client: ChatClient, system: str | None, options: dict[str, Any]) -> int:
    """Read turns and print answers; return the exit status."""
    is_terminal = sys.stdin.isatty()
    try:
        model = client.model()
    except ServerError as error:
        raise ChatError(str(error)) from error
    if is_terminal:
        import readline  # noqa: F401  # adds history and editing to input()

        typer.echo(
            f"{model} at {client.base_url}. Ctrl-C stops an answer, Ctrl-D leaves.", err=True
        )
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            return 0
        except KeyboardInterrupt:
            typer.echo("\nCtrl-D leaves.", err=True)
            continue
        if line.strip():
            messages.append({"role": "user", "content": line})
            _answer(client, model, messages, options, is_terminal)


def _answer(
    client: ChatClient,
    model: str,
    messages: list[dict[str, str]],
    options: dict[str, Any],
    is_terminal: bool,
) -> None:
    """Print the answer as it comes and add it to the messages, unless the request fails."""
    parts: list[str] = []
    try:
        for part in client.stream(model, messages, options):
            parts.append(part)
            sys.stdout.write(part)
            sys.stdout.flush()
    except KeyboardInterrupt:
        typer.echo(" [stopped]", err=True)
    except ServerError as error:
        if not is_terminal:
            raise ChatError(str(error)) from error
        typer.echo(f"\ntokenspeed: {error}", err=True)
        messages.pop()
        return
    typer.echo()
    messages.append({"role": "assistant", "content": "".join(parts)})
