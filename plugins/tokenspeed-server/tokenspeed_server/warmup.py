"""Requests of nobody, answered before a worker counts as ready: the first real one finds nothing left to load."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from typing import Any

import numpy as np

from tokenspeed_core.engine.client import EngineClient
from tokenspeed_core.engine.messages import FinishReason, Outputs, Ready, Submit, to_api
from tokenspeed_core.engine.wire import pack
from tokenspeed_server.app import Routes
from tokenspeed_server.service import ModelText, Options, Service

log = logging.getLogger(__name__)
READY = Ready(2**30, 2**30, 2**31 - 1, "")


class _Echo(EngineClient):
    """The link to no engine: a prompt's own tokens come back, one by one."""

    def __init__(self) -> None:
        super().__init__("inproc://nobody")
        self._dispatch(READY)

    def send(self, message: Any) -> None:
        """Answer a request, by way of what the wire makes of it."""
        if isinstance(message, Submit):
            sequence, one, none = (
                np.array([message.request_id]),
                np.ones(1, np.int32),
                np.zeros(1, np.int32),
            )
            for left in reversed(range(len(message.prompt))):
                finish = none if left else np.array([FinishReason.LENGTH], np.int32)
                outputs = Outputs(sequence, one, message.prompt[[-1 - left]], finish, none)
                self._loop.call_soon(self._dispatch, to_api.unpack(pack(outputs)))


async def rehearse(options: Options, text: ModelText) -> None:
    """Serve what a first client may ask, streamed and whole. No engine, no observer and no middleware hears of it."""
    link = _Echo()
    service = Service(replace(options, observers=()), link)
    service.open(text, READY)
    asked: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": [0] if text.tokenizer is None else "Hello!"}
    }
    if text.template is not None:
        asked["/v1/chat/completions"] = {"messages": [{"role": "user", "content": "Hello!"}]}
    try:
        for path, body in asked.items():
            for stream in (False, True):
                try:
                    await _ask(service, path, {**body, "stream": stream})
                except Exception:  # of a plugin: the first whom it harms is told
                    log.debug("rehearsing %s failed", path, exc_info=True)
    finally:
        service.close()
        link.close()


async def _ask(service: Service, path: str, body: dict[str, Any]) -> None:
    messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()  # nobody hangs up

    async def send(message: Any) -> None:
        return None

    await Routes(service)({"method": "POST", "path": path, "headers": []}, receive, send)
