"""The lines that a server prints when it is ready: its address, and a command to try it."""

from __future__ import annotations

import json
import shlex
import socket
from contextlib import suppress

from tokenspeed_core.commands.serving import ModelText
from tokenspeed_server.listen import url
from tokenspeed_server.settings import ServerConfig


def announce(bound: socket.socket, config: ServerConfig, text: ModelText) -> None:
    """Print the server's address and a command to try it."""
    body: dict[str, object] = {"model": config.served_model_name}
    if text.template is not None:
        route = "chat/completions"
        body["messages"] = [{"role": "user", "content": "Hello!"}]
    else:
        route = "completions"
        body["prompt"] = [1, 2, 3] if text.tokenizer is None else "Hello"
    where, curl = address(bound, config)
    key = "" if config.api_key is None else " -H 'Authorization: Bearer YOUR_KEY'"
    with suppress(OSError):  # stdout may be closed, or a file on a full disk
        print(
            f"TokenSpeed serves {config.served_model_name} at {where}\n"
            f"  {curl}/v1/{route} -H 'Content-Type: application/json'{key} "
            f"-d {shlex.quote(json.dumps(body))}",
            flush=True,
        )


def address(bound: socket.socket, config: ServerConfig) -> tuple[str, str]:
    """Return the server's address, and the start of a curl command with its URL."""
    is_tls, root = config.ssl_certfile is not None, config.root_path or ""
    scheme = "https" if is_tls else "http"
    # curl may not know who signed the certificate.
    curl = "curl -k" if is_tls else "curl"
    if config.uds is not None:
        base = f"{scheme}://localhost{root}"
        return f"{config.uds} ({base})", f"{curl} --unix-socket {shlex.quote(config.uds)} {base}"
    base = url(bound, scheme) + root
    return base, f"{curl} {base}"
