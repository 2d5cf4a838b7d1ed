"""A client that answers requests without an engine, for the server's warm-up."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from tokenspeed_core.commands.serving import (
    EngineClient,
    FinishReason,
    Outputs,
    Ready,
    Submit,
    pack,
    to_api,
)


class EchoClient(EngineClient):
    """Returns the tokens of each prompt."""

    def __init__(self) -> None:
        """Be ready at once."""
        super().__init__("inproc://echo")
        self.receive(Ready(2**30, 2**30, 2**31 - 1, ""))

    def send(self, message: Any) -> None:
        """Answer a request token by token, through the encoding that an engine's messages have."""
        if not isinstance(message, Submit):
            return
        loop, zero = asyncio.get_running_loop(), np.zeros(1, np.int32)
        for position, token in enumerate(message.prompt):
            is_last = position == len(message.prompt) - 1
            finish = FinishReason.LENGTH if is_last else FinishReason.NOT
            outputs = Outputs(
                sequence_ids=np.array([message.request_id], np.int64),
                num_tokens=np.ones(1, np.int32),
                token_ids=np.array([token], np.int32),
                finish=np.array([finish], np.int32),
                num_cached_tokens=zero,
            )
            loop.call_soon(self.receive, to_api.unpack(pack(outputs)))
