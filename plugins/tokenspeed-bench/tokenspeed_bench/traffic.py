"""Seeded token-id traffic, the same for every engine.

Offline traffic is a list of waves; a wave is a list of (prompt ids, output length) and starts when
the wave before it is done. Online traffic is a list of sessions; a session sends its next turn when
the last one is answered and its pause is over.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from inspect import signature
from typing import Any

Request = tuple[list[int], int]
Workload = list[list[Request]]

FIRST_ID, END_ID = 1000, 90_000  # ordinary tokens in every large vocabulary
SEED_OF_LOADS = 5
SEED_OF_AGENTS = 6


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: the prompt is the session's first `end` ids, sent `pause` seconds after the last answer."""

    end: int
    out_len: int
    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """Consecutive requests; each prompt starts with the one before."""

    ids: list[int]
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Traffic:
    """A name, the parameters, and the sessions."""

    name: str
    parameters: dict[str, Any]
    sessions: list[Session] = field(repr=False)

    def describe(self) -> dict[str, Any]:
        """Return the values that two results must share to be compared."""
        return {"name": self.name, **self.parameters}

    def waves(self) -> Workload:
        """Return the turns as waves without pauses: all first turns, then all second turns, and so on."""
        most = max(len(session.turns) for session in self.sessions)
        return [
            [
                (s.ids[: s.turns[i].end], s.turns[i].out_len)
                for s in self.sessions
                if i < len(s.turns)
            ]
            for i in range(most)
        ]


def random_ids(rng: random.Random, length: int) -> list[int]:
    """Return a prompt of random ids."""
    return [rng.randrange(FIRST_ID, END_ID) for _ in range(length)]


def latency(in_len: int = 128, out_len: int = 256) -> Workload:
    """One user, bound by decoding: milliseconds per output token."""
    return [[(random_ids(random.Random(1), in_len), out_len)]]


def throughput(num_requests: int = 256, in_len: int = 512, out_len: int = 256) -> Workload:
    """A batch of unrelated requests: output tokens per second."""
    rng = random.Random(2)
    return [[(random_ids(rng, in_len), out_len) for _ in range(num_requests)]]


def prefill(num_requests: int = 64, in_len: int = 4096, out_len: int = 1) -> Workload:
    """Prompts with almost no output: prompt tokens per second."""
    rng = random.Random(3)
    return [[(random_ids(rng, in_len), out_len) for _ in range(num_requests)]]


def agentic(
    num_sessions: int = 32,
    num_turns: int = 6,
    system_len: int = 4096,
    observation_len: int = 384,
    out_len: int = 96,
) -> Workload:
    """Agents that share a system prompt and extend their own histories. It needs prefix caching.

    The model's replies in a history are fixed ids, so that every engine sees the same prompts.
    """
    rng = random.Random(4)
    system = random_ids(rng, system_len)
    histories = [system + random_ids(rng, observation_len) for _ in range(num_sessions)]
    waves: Workload = []
    for _ in range(num_turns):
        waves.append([(list(history), out_len) for history in histories])
        histories = [
            history + random_ids(rng, out_len) + random_ids(rng, observation_len)
            for history in histories
        ]
    return waves


WORKLOADS: dict[str, Callable[..., Workload]] = {
    "latency": latency,
    "throughput": throughput,
    "prefill": prefill,
    "agentic": agentic,
}


@dataclass(frozen=True, slots=True)
class AgentShape:
    """Parameters of coding agents, in tokens and seconds. `pause_scale` scales all pauses.

    A prompt is `turn_len` longer than the one before: the reply (fixed ids) and the next input. A
    pause is exponential, with a tool's mean or, with probability `person_share`, a person's.
    """

    num_sessions: int = 8
    first_len: int = 50_000
    shared_len: int = 10_000
    turn_len: int = 800
    out_len: int = 250
    min_turns: int = 10
    max_turns: int = 15
    tool_pause: float = 1.0
    person_pause: float = 60.0
    person_share: float = 0.2
    pause_scale: float = 1.0


def agents(shape: AgentShape) -> Traffic:
    """Return the sessions of long-lived agents."""
    rng = random.Random(SEED_OF_AGENTS)
    shared = random_ids(rng, shape.shared_len)
    sessions = []
    for _ in range(shape.num_sessions):
        num_turns = rng.randint(shape.min_turns, shape.max_turns)
        ids = shared + random_ids(
            rng, shape.first_len - shape.shared_len + (num_turns - 1) * shape.turn_len
        )
        turns = []
        for i in range(num_turns):
            is_person = rng.random() < shape.person_share
            pause = rng.expovariate(1.0) * (shape.person_pause if is_person else shape.tool_pause)
            turns.append(
                Turn(
                    shape.first_len + i * shape.turn_len,
                    shape.out_len,
                    pause * shape.pause_scale * (i > 0),
                )
            )
        sessions.append(Session(ids, tuple(turns)))
    return Traffic("agents", asdict(shape), sessions)


def load(num_requests: int, in_len: int, out_len: int, is_fixed: bool) -> Traffic:
    """Return single-turn requests. Lengths vary by half unless `is_fixed`."""
    rng = random.Random(SEED_OF_LOADS)

    def vary(length: int) -> int:
        return length if is_fixed else rng.randint(max(1, length // 2), length + length // 2)

    sessions = []
    for _ in range(num_requests):
        ids = random_ids(rng, vary(in_len))
        sessions.append(Session(ids, (Turn(len(ids), vary(out_len)),)))
    numbers = {"requests": num_requests, "in_len": in_len, "out_len": out_len, "fixed": is_fixed}
    return Traffic("load", numbers, sessions)


def of_workload(name: str, **lengths: int) -> Traffic:
    """Return a named workload, with some lengths replaced."""
    waves = WORKLOADS[name](**lengths)
    sessions = [
        Session(turns[-1][0], tuple(Turn(len(prompt), out_len) for prompt, out_len in turns))
        for turns in zip(*waves, strict=True)
    ]
    return Traffic(name, parameters_of(name) | lengths, sessions)


def parameters_of(name: str) -> dict[str, int]:
    """Return the parameters of a named workload with their defaults."""
    return {each.name: each.default for each in signature(WORKLOADS[name]).parameters.values()}


def below(traffic: Traffic, end_id: int) -> Traffic:
    """Return the traffic with ids folded below `end_id`, for a small vocabulary."""
    if end_id >= END_ID:
        return traffic
    first = min(FIRST_ID, end_id // 2)
    sessions = [
        Session(_fold(session.ids, first, end_id), session.turns) for session in traffic.sessions
    ]
    return Traffic(traffic.name, traffic.parameters | {"end_id": end_id}, sessions)


def _fold(ids: Sequence[int], first: int, end: int) -> list[int]:
    return [first + (token - FIRST_ID) % (end - first) for token in ids]
