"""The engine's sockets to the API workers, and the split of outputs among them."""

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
    """Return a socket to which one API worker connects."""
    socket: Socket = zmq.Context.instance().socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.bind(address)
    return socket


def send(socket: Socket, message: Any) -> None:
    """Send a message, or drop it if the worker has exited."""
    with suppress(zmq.Again):
        socket.send(pack(message), zmq.DONTWAIT)


def send_outputs(sockets: Sequence[Socket], outputs: Outputs) -> None:
    """Send each API worker the rows of its sequences, in one message."""
    if len(sockets) > 1:
        for worker, part in split(outputs):
            send(sockets[worker], part)
    elif len(outputs.sequence_ids) or outputs.prompts:
        send(sockets[0], outputs)


def split(outputs: Outputs) -> Iterator[tuple[int, Outputs]]:
    """Yield the number of each API worker with sequences in the step, and their rows."""
    workers = outputs.sequence_ids >> WORKER_SHIFT
    prompts = [each.sequence_id >> WORKER_SHIFT for each in outputs.prompts]
    for worker in sorted({*workers.tolist(), *prompts}):
        rows = workers == worker
        part = Outputs(
            outputs.sequence_ids[rows],
            outputs.num_tokens[rows],
            outputs.token_ids[np.repeat(rows, outputs.num_tokens)],
            outputs.finish[rows],
            outputs.num_cached_tokens[rows],
            _select_logprobs(outputs, rows),
            tuple(
                each
                for each, owner in zip(outputs.prompts, prompts, strict=True)
                if owner == worker
            ),
        )
        yield worker, part


def _select_logprobs(outputs: Outputs, rows: Bool) -> StepLogprobs | None:
    """Return the log-probabilities of the rows that the mask selects."""
    whole = outputs.logprobs
    if whole is None:
        return None
    is_selected = rows[whole.rows]
    new_rows = np.cumsum(rows, dtype=np.int32) - np.int32(1)
    entries = np.repeat(is_selected, outputs.num_tokens[whole.rows])
    alternatives = np.repeat(entries, whole.width)
    return StepLogprobs(
        new_rows[whole.rows[is_selected]],
        whole.width,
        whole.chosen[entries],
        whole.ranks[entries],
        whole.top_ids[alternatives],
        whole.top_values[alternatives],
    )
