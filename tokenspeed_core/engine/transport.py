"""The engine's sockets to the API workers, and whose tokens are whose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import zmq

from tokenspeed_core.api.step import Bool, StepLogprobs
from tokenspeed_core.engine.messages import WORKER_SHIFT, Outputs
from tokenspeed_core.engine.wire import pack

Socket = zmq.Socket[bytes]


def bind(address: str) -> Socket:
    """Return a socket to which an API worker connects."""
    socket: Socket = zmq.Context.instance().socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.bind(address)
    return socket


def send(socket: Socket, message: Any) -> None:
    """Send a message; to a worker that is gone nothing goes."""
    with suppress(zmq.Again):
        socket.send(pack(message), zmq.DONTWAIT)


def send_outputs(sockets: Sequence[Socket], outputs: Outputs) -> None:
    """Send each API worker its own sequences' tokens, in one message."""
    if len(sockets) > 1:
        for worker, part in split(outputs):
            send(sockets[worker], part)
    elif len(outputs.sequence_ids):
        send(sockets[0], outputs)


def split(outputs: Outputs) -> Iterator[tuple[int, Outputs]]:
    """Yield each API worker that has sequences in a step, with their rows."""
    owners = outputs.sequence_ids >> WORKER_SHIFT
    for worker in sorted(set(owners.tolist())):
        rows = owners == worker
        yield (
            worker,
            Outputs(
                outputs.sequence_ids[rows],
                outputs.num_tokens[rows],
                outputs.token_ids[np.repeat(rows, outputs.num_tokens)],
                outputs.finish[rows],
                outputs.num_cached_tokens[rows],
                _logprobs(outputs, rows),
            ),
        )


def _logprobs(outputs: Outputs, rows: Bool) -> StepLogprobs | None:
    """Return the log-probabilities of some of the rows, if any of all has them."""
    if (whole := outputs.logprobs) is None:
        return None
    listed, place = rows[whole.rows], np.cumsum(rows, dtype=np.int32) - np.int32(1)
    entries = np.repeat(listed, outputs.num_tokens[whole.rows])
    tops = np.repeat(entries, whole.width)
    return StepLogprobs(
        place[whole.rows[listed]],
        whole.width,
        whole.chosen[entries],
        whole.ranks[entries],
        whole.top_ids[tops],
        whole.top_values[tops],
    )
