"""Requests without an engine before the server is ready, so that the first client's request is fast."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import replace
from typing import Any

from tokenspeed_core.commands.serving import CheckpointError, ModelText, Ready, TemplateError
from tokenspeed_server import asgi
from tokenspeed_server.app import create_app
from tokenspeed_server.echo_client import EchoClient
from tokenspeed_server.service import Options, Service

GREETING = "Hello!"

log = logging.getLogger(__name__)


async def warm_up(options: Options, text: ModelText) -> None:
    """Answer a completion and a chat, whole and streamed, on a separate app.

    Observers, middleware and the engine see nothing of it. A request that fails is logged at debug
    level only: the same error will reach the client that causes it.
    """
    engine = EchoClient()
    service = Service(
        replace(options, observers=(), api_key=None, logs_exchanges=False, request_log_level=None),
        engine,
    )
    service.open(text, engine.ready.result())
    app = create_app(service)
    requests: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": [0] if text.tokenizer is None else GREETING}
    }
    if text.template is not None:
        requests["/v1/chat/completions"] = {"messages": [{"role": "user", "content": GREETING}]}
    try:
        for path, body in requests.items():
            for stream in (False, True):
                try:
                    data = json.dumps({**body, "stream": stream}).encode()
                    await asgi.post(app, path, data, log_level=logging.DEBUG)
                except Exception:
                    log.debug("warm-up request to %s failed", path, exc_info=True)
    finally:
        service.close()


def check_vocabulary(text: ModelText, ready: Ready) -> None:
    """Raise CheckpointError if a plain prompt or chat has ids that the model lacks: all requests would fail."""
    if text.tokenizer is None:
        return
    prompts = {"the tokenizer": GREETING}
    if text.template is not None:
        with suppress(TemplateError):  # other chats may not have this error
            chat = [{"role": "user", "content": GREETING}]
            prompts["the chat template"] = text.template.render(chat)
    for name, prompt in prompts.items():
        ids = text.tokenizer.encode(prompt, add_special_tokens=False)
        highest = int(ids.max(initial=0))
        if highest >= ready.vocab_size:
            raise CheckpointError(
                f"{name} encodes a plain prompt to the token id {highest}, but the model's ids are 0 to "
                f"{ready.vocab_size - 1}. The tokenizer is not the model's: see --tokenizer."
            )
