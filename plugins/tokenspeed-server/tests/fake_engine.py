"""An engine process without a model. It echoes prompts; some first tokens make it misbehave."""

from __future__ import annotations

import os
import select
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zmq

from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.api.step import StepLogprobs
from tokenspeed_core.engine.messages import (
    Abort,
    Drain,
    Failed,
    Heartbeat,
    Outputs,
    PromptLogprobs,
    Ready,
    Rejected,
    Submit,
    WorkerReady,
    to_engine,
)
from tokenspeed_core.engine.parent_death import attach_to_parent
from tokenspeed_core.engine.stats import (
    HOST_BOUNDS,
    REQUEST_BOUNDS,
    STEP_BOUNDS,
    EngineStats,
    Histogram,
)
from tokenspeed_core.engine.transport import bind, send, send_outputs
from tokenspeed_core.engine.wire import pack

STALLS, DIES, ERRS, QUEUE_FULL, NEVER_ENDS = 390, 391, 392, 393, 394  # first tokens of prompts


@dataclass
class Sequence:
    """A sequence. It repeats its prompt, from its own offset on."""

    request: Submit
    index: int
    tokens: list[int] = field(default_factory=list)

    def step(self) -> FinishReason:
        prompt = self.request.prompt
        if not self.request.max_tokens:
            return FinishReason.LENGTH
        self.tokens.append(int(prompt[(self.index + len(self.tokens)) % len(prompt)]))
        if prompt[0] == ERRS:
            return FinishReason.ERROR
        if self.tokens[-1] in self.request.stop_token_ids:
            return FinishReason.STOP
        return (
            FinishReason.LENGTH if len(self.tokens) >= self.request.max_tokens else FinishReason.NOT
        )


def score(sequence_id: int, sequence: Sequence) -> PromptLogprobs:
    """Give the prompt token at position p the value -p and rank 2; token p + k is the k-th alternative."""
    num, width = len(sequence.request.prompt) - 1, sequence.request.prompt_logprobs
    at = np.arange(1, num + 1)
    top = at[:, None] + np.arange(width)
    return PromptLogprobs(
        sequence_id,
        width,
        -at.astype(np.float32),
        np.full(num, 2, np.int32),
        top.astype(np.int32).ravel(),
        -top.astype(np.float32).ravel(),
    )


def make_stats() -> EngineStats:
    """Return statistics with 7 preemptions and half of 100 blocks in use."""
    steps, host = Histogram(STEP_BOUNDS).snapshot(), Histogram(HOST_BOUNDS).snapshot()
    times = Histogram(REQUEST_BOUNDS).snapshot()
    return EngineStats(
        7,
        1,
        2,
        3,
        4,
        5,
        20,
        30,
        45,
        5,
        steps,
        host,
        times,
        times,
        4,
        12,
        (3, 2),
        (4, 4, 4),
        3.0,
        True,
        -1.5,
    )


class FakeEngine:
    """Answers API workers until it drained or its parent's pipe closes."""

    def __init__(self, config: dict[str, Any], addresses: list[str], parent: int) -> None:
        self.config = config
        self.parent = parent
        self.sockets = [bind(address) for address in addresses]
        self.num_silent = len(addresses)
        self.sequences: dict[int, Sequence] = {}
        self.num_steps = 0
        self.is_draining = False

    def run(self) -> None:
        self.note("start")
        if "fails" in self.config and os.path.exists(self.config.get("fails_with", "/")):
            self.sockets[0].send(pack(Failed(self.config["fails"])))
            self.sockets[0].close(linger=1000)
            return
        time.sleep(self.config.get("start_seconds", 0))
        while not os.path.exists(self.config.get("starts_after", self.config["log"])):
            time.sleep(0.02)
        next_pulse, num_told = 0.0, 0
        while not (self.is_draining and not self.sequences):
            wait = self.config.get("step_seconds", 0.0) if self.sequences else 0.2
            descriptors = [int(socket.getsockopt(zmq.FD)) for socket in self.sockets]
            readable, _, _ = select.select([self.parent, *descriptors], [], [], wait)
            if self.parent in readable:
                self.note("orphaned")
                return
            for socket in self.sockets:
                while int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                    self.take(socket, to_engine.unpack(socket.recv()))
            self.step()
            if time.monotonic() > next_pulse or len(self.sequences) != num_told:
                next_pulse = time.monotonic() + 0.2
                self.send_all(
                    Heartbeat(
                        self.num_steps, len(self.sequences), 0, self.is_draining, make_stats()
                    )
                )
                if len(self.sequences) != num_told:
                    num_told = len(self.sequences)
                    self.note(f"heartbeat {num_told}")
        self.note("drained")

    def send_all(self, message: Any) -> None:
        for socket in self.sockets:
            send(socket, message)

    def take(self, socket: zmq.Socket[bytes], message: Any) -> None:
        match message:
            case Submit() if message.prompt[0] == DIES:
                os._exit(3)
            case Submit() if message.prompt[0] == QUEUE_FULL:
                send(socket, Rejected(message.request_id, "queue_full", "the queue is full"))
            case Submit():
                self.note(
                    f"submit {message.request_id} x{message.n} seed={message.seed} t={message.temperature} tenant={message.tenant}"
                )
                for index in range(message.n):
                    self.sequences[message.request_id + index] = Sequence(message, index)
            case Abort():
                for sequence_id in message.sequence_ids.tolist():
                    self.sequences.pop(sequence_id, None)
                    self.note(f"abort {sequence_id}")
            case Drain():
                self.is_draining = True
            case WorkerReady():
                self.note(f"hello {self.sockets.index(socket)}")
                self.num_silent -= 1
                if not self.num_silent:
                    longest, vocab_size = (
                        self.config.get("max_model_len", 512),
                        self.config["vocab_size"],
                    )
                    self.send_all(Ready(longest, 4096, vocab_size, '{"plan": []}'))

    def step(self) -> None:
        is_held = os.path.exists(self.config.get("held_by", ""))
        if is_held or not self.sequences:
            return
        if any(s.request.prompt[0] == STALLS for s in self.sequences.values()):
            return
        self.num_steps += 1
        ids = list(self.sequences)
        running = [self.sequences[i] for i in ids]
        prompts = [
            score(sequence_id, sequence)
            for sequence_id, sequence in zip(ids, running, strict=True)
            if not sequence.tokens and not sequence.index and sequence.request.prompt_logprobs >= 0
        ]
        finish = [sequence.step() for sequence in running]
        num_tokens = [1 if s.tokens else 0 for s in running]
        logprob_rows = [
            row for row, s in enumerate(running) if s.request.logprobs >= 0 and s.tokens
        ]
        width = max((running[row].request.logprobs for row in logprob_rows), default=0)
        chosen = [running[row].tokens[-1] for row in logprob_rows]
        send_outputs(
            self.sockets,
            Outputs(
                np.array(ids, np.int64),
                np.array(num_tokens, np.int32),
                np.array([s.tokens[-1] for s in running if s.tokens], np.int32),
                np.array(finish, np.int32),
                np.array(
                    [len(s.request.prompt) - 1 if len(s.tokens) == 1 else 0 for s in running],
                    np.int32,
                ),
                StepLogprobs(
                    np.array(logprob_rows, np.int32),
                    width,
                    np.full(len(chosen), -0.5, np.float32),
                    np.ones(len(chosen), np.int32),
                    np.array(
                        [(i + k) % self.config["vocab_size"] for i in chosen for k in range(width)],
                        np.int32,
                    ),
                    np.array([-0.5 - k for _ in chosen for k in range(width)], np.float32),
                ),
                tuple(prompts),
            ),
        )
        for sequence_id, end in zip(ids, finish, strict=True):
            if end != FinishReason.NOT:
                del self.sequences[sequence_id]

    def note(self, text: str) -> None:
        with open(self.config["log"], "a", encoding="utf-8") as log:
            log.write(f"{os.getpid()} {text}\n")


if __name__ == "__main__":
    data, pipe = attach_to_parent(sys.argv[1:])
    FakeEngine(data["config"], data["addresses"], pipe).run()
