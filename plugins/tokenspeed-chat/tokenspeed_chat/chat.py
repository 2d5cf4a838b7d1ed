"""The conversation: turns of a person, or of lines from a pipe."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from tokenspeed_chat.client import ChatClient, Unreachable, is_address
from tokenspeed_core import TokenSpeedError
from tokenspeed_core.commands.settings import ConfigFile, ModelArgument, configure


class ChatError(TokenSpeedError):
    """A conversation that cannot be had."""


def talk(
    *,
    positional: ModelArgument = None,
    base_url: Annotated[str | None, typer.Option("--base-url", help="a server that runs")] = None,
    system: Annotated[str | None, typer.Option("--system", help="the system message")] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0, help="0: the likeliest")
    ] = None,
    config: ConfigFile = None,
    flags: dict[str, Any],
) -> int:
    """Talk until Ctrl-D; Ctrl-C stops an answer. Lines from a pipe are turns too."""
    options = {} if temperature is None else {"temperature": temperature}
    if base_url is not None:
        if positional is not None or config is not None or set(flags) - {"api_key"}:
            raise ChatError(
                "--base-url takes a server as it runs: settings of a server go without it"
            )
        if not is_address(base_url):
            raise ChatError(
                f"--base-url {base_url!r}: must be the address of a server, such as http://127.0.0.1:8000"
            )
        key = flags.get("api_key") or os.environ.get("TOKENSPEED_API_KEY")
        return _take_turns(ChatClient(base_url, key), system, options)
    resolved = configure(positional, flags, config)
    from tokenspeed_chat.child import started_server

    with started_server(resolved) as url:
        return _take_turns(ChatClient(url, resolved.api_key), system, options)


def _take_turns(client: ChatClient, system: str | None, options: dict[str, Any]) -> int:
    """Take turns; return the exit status."""
    is_person = sys.stdin.isatty()
    try:
        model = client.model()
    except Unreachable as error:
        raise ChatError(str(error)) from error
    if is_person:
        import readline  # noqa: F401  # gives input() its history and editing

        typer.echo(
            f"{model} at {client.base_url}. Ctrl-C stops an answer, Ctrl-D leaves.", err=True
        )
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    while True:
        try:
            line = input("> " if is_person else "")
        except EOFError:
            return 0
        except KeyboardInterrupt:
            typer.echo("\nCtrl-D leaves.", err=True)
            continue
        if line.strip():
            messages.append({"role": "user", "content": line})
            _answer(client, model, messages, options, is_person)


def _answer(
    client: ChatClient,
    model: str,
    messages: list[dict[str, str]],
    options: dict[str, Any],
    is_person: bool,
) -> None:
    """Print the answer as it comes, and remember what was said of it. What failed is not remembered."""
    parts: list[str] = []
    try:
        for part in client.stream(model, messages, options):
            parts.append(part)
            sys.stdout.write(part)
            sys.stdout.flush()
    except KeyboardInterrupt:
        typer.echo(" [stopped]", err=True)
    except Unreachable as error:
        if not is_person:
            raise ChatError(str(error)) from error
        typer.echo(f"\ntokenspeed: {error}", err=True)
        messages.pop()
        return
    typer.echo()
    messages.append({"role": "assistant", "content": "".join(parts)})
