"""Traffic: its tokens never change, because other engines were measured with them."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from tokenspeed_bench.traffic import (
    END_ID,
    WORKLOADS,
    AgentShape,
    Session,
    agents,
    below,
    load,
    of_workload,
)


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("latency", "0c8abe74c322d5b0"),
        ("throughput", "8ef8aec0e662655e"),
        ("prefill", "f96766c5bdf3d5ba"),
        ("agentic", "eddf52fa85028dff"),
    ],
)
def test_tokens_of_workloads_never_change(name: str, expected: str) -> None:
    assert digest(WORKLOADS[name]()) == expected


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((16, 128, 128, False), "5841dd69057c702b"),
        ((512, 256, 128, False), "61d070fa3a541776"),
        ((64, 256, 128, True), "39c2779aff790ec7"),
    ],
)
def test_tokens_of_loads_never_change(numbers: tuple[int, int, int, bool], expected: str) -> None:
    jobs = [(session.ids, session.turns[0].out_len) for session in load(*numbers).sessions]
    assert digest(jobs) == expected


@pytest.mark.parametrize("name", WORKLOADS)
def test_sessions_and_waves_are_the_same_requests(name: str) -> None:
    assert of_workload(name).waves() == WORKLOADS[name]()


def test_agent_sessions_have_the_given_shape() -> None:
    shape = AgentShape(
        num_sessions=6, first_len=500, shared_len=100, turn_len=40, out_len=8, pause_scale=0.5
    )
    traffic = agents(shape)
    assert len(traffic.sessions) == 6
    for session in traffic.sessions:
        assert shape.min_turns <= len(session.turns) <= shape.max_turns
        assert session.ids[:100] == traffic.sessions[0].ids[:100]
        assert (
            session.ids[100:120] != traffic.sessions[0].ids[100:120]
            or session is traffic.sessions[0]
        )
        assert [turn.end for turn in session.turns] == [
            500 + 40 * i for i in range(len(session.turns))
        ]
        assert session.turns[-1].end == len(session.ids)
        assert session.turns[0].pause == 0
        assert all(turn.pause > 0 for turn in session.turns[1:])


def test_default_agents_resemble_coding_agents() -> None:
    traffic = agents(AgentShape())
    assert {session.turns[0].end for session in traffic.sessions} == {50_000}
    grown = [
        b.end - a.end
        for each in traffic.sessions
        for a, b in zip(each.turns, each.turns[1:], strict=False)
    ]
    assert set(grown) == {800}
    assert {len(session.turns) for session in traffic.sessions} <= set(range(10, 16))
    pauses = sorted(turn.pause for session in traffic.sessions for turn in session.turns[1:])
    assert pauses[len(pauses) // 2] < 5 < 30 < pauses[-1], (
        "most pauses are a tool's, some a person's"
    )


def test_pause_scale_changes_only_pauses() -> None:
    whole, half = (agents(AgentShape(2, 50, 10, 5, 3, pause_scale=scale)) for scale in (1.0, 0.5))
    for a, b in zip(whole.sessions, half.sessions, strict=True):
        assert a.ids == b.ids
        assert [turn.pause / 2 for turn in a.turns] == [turn.pause for turn in b.turns]


@pytest.mark.parametrize("end", [200, 1_500, 30_000])
def test_folded_ids_are_recorded(
    end: int,
) -> None:
    folded = below(load(4, 50, 5, is_fixed=False), end)
    assert all(0 <= token < end for session in folded.sessions for token in session.ids)
    assert folded.describe()["end_id"] == end
    assert len({tuple(session.ids) for session in folded.sessions}) == 4


def test_large_vocabulary_keeps_the_ids() -> None:
    traffic = load(4, 50, 5, is_fixed=False)
    assert below(traffic, END_ID) is traffic
    assert isinstance(traffic.sessions[0], Session)
    assert traffic.describe() == {
        "name": "load",
        "requests": 4,
        "in_len": 50,
        "out_len": 5,
        "fixed": False,
    }


def test_every_request_has_a_token() -> None:
    turns = [turn for session in load(50, 1, 1, is_fixed=False).sessions for turn in session.turns]
    assert {(turn.end, turn.out_len) for turn in turns} == {(1, 1)}
