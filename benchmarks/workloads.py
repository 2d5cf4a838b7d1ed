"""Seeded token-id traffic, the same for every engine that is measured with it.

A workload is a list of waves, a wave a list of (prompt ids, output length). A wave starts when the wave
before it is done, which is what makes an agent's turns follow each other.
"""

from __future__ import annotations

import random
from collections.abc import Callable

Request = tuple[list[int], int]
Workload = list[list[Request]]

FIRST_ID, END_ID = 1000, 90_000  # ordinary tokens in every vocabulary that is measured


def random_ids(rng: random.Random, length: int) -> list[int]:
    """Return a prompt of random ids."""
    return [rng.randrange(FIRST_ID, END_ID) for _ in range(length)]


def latency(in_len: int = 128, out_len: int = 256) -> Workload:
    """One user, bound by decoding: milliseconds per output token."""
    return [[(random_ids(random.Random(1), in_len), out_len)]]


def throughput(num_requests: int = 256, in_len: int = 512, out_len: int = 256) -> Workload:
    """A full batch of requests with nothing in common: output tokens per second."""
    rng = random.Random(2)
    return [[(random_ids(rng, in_len), out_len) for _ in range(num_requests)]]


def prefill(num_requests: int = 64, in_len: int = 4096, out_len: int = 1) -> Workload:
    """Prompts and next to no output: prompt tokens per second."""
    rng = random.Random(3)
    return [[(random_ids(rng, in_len), out_len) for _ in range(num_requests)]]


def agentic(
    num_sessions: int = 32, num_turns: int = 6, system_len: int = 4096, observation_len: int = 384,
    out_len: int = 96,
) -> Workload:
    """Agents that share a system prompt and each extend a history of their own: needs prefix reuse.

    The model's replies in the history are fixed ids, so that every engine sees the same prompts.
    """
    rng = random.Random(4)
    system = random_ids(rng, system_len)
    histories = [system + random_ids(rng, observation_len) for _ in range(num_sessions)]
    waves: Workload = []
    for _ in range(num_turns):
        waves.append([(list(history), out_len) for history in histories])
        histories = [
            history + random_ids(rng, out_len) + random_ids(rng, observation_len) for history in histories
        ]
    return waves


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "latency": latency, "throughput": throughput, "prefill": prefill, "agentic": agentic,
}
