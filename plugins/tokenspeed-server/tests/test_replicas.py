"""Several engines with one model: the routing of requests, and the answers when an engine dies."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_support import Running, running, wait_until
from test_metrics import sample
from test_workers import all_ended, ask_from_all, connections, in_background, workers
from tokenspeed_server.replicas.memory import GRANULARITY, ReplicaMemory, prefix_digests
from tokenspeed_server.replicas.router import SEQUENCE_COST, ReplicaLoad, choose
from tokenspeed_server.replicas.stalls import StallLog

from tokenspeed_core.commands.serving import State

TOKENS = np.arange(10 * GRANULARITY, dtype=np.int32)
ENDLESS: dict[str, Any] = {"prompt": [70, 71], "max_tokens": 400, "stream": True}


def test_cached_prefix_decides_between_equal_loads() -> None:
    assert choose([ReplicaLoad(3), ReplicaLoad(3)], [0, 64], 100) == 1


def test_load_outweighs_a_short_prefix() -> None:
    loads = [ReplicaLoad(0), ReplicaLoad(1 + 64 // SEQUENCE_COST)]
    assert choose(loads, [0, 64], 100) == 0
    assert choose([ReplicaLoad(0, 0), ReplicaLoad(0, 65)], [0, 64], 100) == 0


def test_idle_replicas_take_turns() -> None:
    assert choose([ReplicaLoad(0, 0, 500), ReplicaLoad(0, 0, 499)], [0, 0], 10) == 1


@given(
    st.lists(
        st.tuples(st.integers(0, 99), st.integers(0, 9999), st.integers(0, 999), st.booleans()),
        max_size=6,
    )
)
def test_only_usable_replicas_are_chosen(given: list[tuple[int, int, int, bool]]) -> None:
    loads = [ReplicaLoad(a, b) if usable else None for a, b, _, usable in given]
    chosen = choose(loads, [cached for _, _, cached, _ in given], 1000)
    if chosen is None:
        assert not any(loads)
    else:
        assert loads[chosen] is not None


def test_all_workers_find_the_longest_prefixes() -> None:
    memory = ReplicaMemory(2, 3)
    other = ReplicaMemory(2, 3, memory.fd)  # as in another process
    digests = prefix_digests(TOKENS, "key", "")
    memory.add(0, digests[:2])
    other.add(2, digests)
    expected = [2 * GRANULARITY, 0, 9 * GRANULARITY]  # the last token is always computed
    assert memory.find(digests) == other.find(digests) == expected
    memory.set_load(0, 1, ReplicaLoad(2, 30, 5))
    other.set_load(1, 1, ReplicaLoad(1, 4, 5))
    assert memory.loads()[1] == ReplicaLoad(3, 34, 10)


@pytest.mark.parametrize(("tenant", "salt"), [("other", ""), ("key", "salt")])
def test_tenants_and_salts_share_no_prefix(tenant: str, salt: str) -> None:
    memory = ReplicaMemory(1, 2)
    memory.add(0, prefix_digests(TOKENS, "key", ""))
    assert memory.find(prefix_digests(TOKENS, tenant, salt)) == [0, 0]


def test_table_of_a_small_cache_forgets_old_prefixes() -> None:
    memory = ReplicaMemory(1, 1)
    memory.fit(4 * GRANULARITY)
    first = prefix_digests(TOKENS, "a", "")
    memory.add(0, first)
    for number in range(40):
        memory.add(0, prefix_digests(TOKENS, f"other {number}", ""))
    assert memory.find(first) == [0]


def test_stall_is_logged_once_with_its_end(caplog: pytest.LogCaptureFixture) -> None:
    engine = SimpleNamespace(state=State.READY, why_unhealthy=lambda: reasons[-1])
    other = SimpleNamespace(state=State.STARTING, why_unhealthy=lambda: "the engine is starting")
    engines: Any = SimpleNamespace(
        clients=[other, engine], name_of=lambda number: f"engine {number}"
    )
    stalls, reasons = StallLog(engines), [None]
    caplog.set_level("INFO")
    for reason in (None, "no heartbeat for 9 s", "no heartbeat for 10 s", None, None):
        reasons.append(reason)
        stalls.check()
    assert caplog.messages == ["engine 1 stalled: no heartbeat for 9 s", "engine 1 continues"]
    reasons.append("no heartbeat for 9 s")
    stalls.check()
    engine.state = State.DEAD
    stalls.check()
    assert len(caplog.messages) == 3  # its death is logged elsewhere


def engine_of(server: Running) -> Counter[int]:
    """Return how many requests each engine process got."""
    lines = server.log.read_text().splitlines()
    return Counter(int(line.split()[0]) for line in lines if line.split()[1] == "submit")


@pytest.mark.slow
def test_conversation_stays_on_its_replica_in_all_workers(tmp_path: Path) -> None:
    with (
        running(tmp_path, num_workers=2, num_engines=2, has_metrics=True) as server,
        connections(server, 8) as clients,
    ):
        # The cached prefix outweighs the sequence before, which may not count as finished yet.
        prompt = [1 + i % 300 for i in range(SEQUENCE_COST + 3 * GRANULARITY + 1)]
        for client in clients:
            answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2})
            assert answer.json()["choices"][0]["finish_reason"] == "length"
        assert sorted(engine_of(server).values()) == [8]
        answers = ask_from_all(clients, {"prompt": [5] * 8, "max_tokens": 2, "n": 2})
        assert all(not isinstance(each, Exception) for each in answers)
        stats = clients[0].get("/v1/stats").json()
        wait_until(lambda: "replicas" in clients[0].get("/v1/stats").json(), 30, "heartbeats")
        stats = clients[0].get("/v1/stats").json()
        assert len(stats["replicas"]) == 2
        assert stats["totals"]["preemptions"] == 14  # 7 of each fake engine
        page = clients[0].get("/metrics").text
        assert sample(page, "num_preemptions_total", engine="0") == 7
        assert sample(page, "num_preemptions_total", engine="1") == 7
        wait_until(
            lambda: (
                sample(clients[0].get("/metrics").text, "request_success_total", engine="all") >= 0
            ),
            30,
            "requests of all engines",
        )
        server.process.send_signal(signal.SIGTERM)
        assert all_ended(server, workers(server)) == 0
        assert server.notes().count("drained") == 2


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.release), 2])
def test_requests_of_the_other_replica_survive_a_death(tmp_path: Path, num_workers: int) -> None:
    held = tmp_path / "held"
    held.touch()
    engine = {"held_by": str(held)}
    with (
        running(tmp_path, engine=engine, num_workers=num_workers, num_engines=2) as server,
        connections(server, 8) as clients,
    ):
        others = workers(server)
        thread, answers = in_background(server, clients, ENDLESS | {"max_tokens": 30})
        requests = engine_of(server)
        assert len(requests) == 2, "one replica got all requests"
        victim = next(iter(requests))
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: "died: its process was killed" in server.said(), 60, "a log line")
        assert thread.is_alive()
        held.unlink()
        thread.join(60)
        texts = [each.text for each in answers]
        num_failed = sum('"code": "engine_dead"' in text for text in texts)
        num_whole = sum('"finish_reason":"length"' in text for text in texts)
        assert (num_failed, num_whole) == (requests[victim], 8 - requests[victim])
        assert all_ended(server, others) == 1
        assert "of 2 died: its process was killed by SIGKILL" in server.complaints()


@pytest.mark.release  # by default, one engine cannot start, and a replica cannot start again
def test_replica_that_cannot_start_ends_the_server(tmp_path: Path) -> None:
    engine = {"fails": "no memory"}
    with running(tmp_path, engine=engine, num_engines=2, waits=False) as server:
        assert server.process.wait(60) == 1
        # Both fail; the first one is named.
        assert re.search(r"could not start: engine [01] of 2: no memory", server.complaints())


def engine_pids(server: Running) -> set[int]:
    """Return the processes of the fake engines."""
    return {
        child.pid
        for child in psutil.Process(server.process.pid).children()
        if any(part.endswith("fake_engine.py") for part in child.cmdline())
    }


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.release), 2])
def test_replica_that_died_starts_again_while_the_other_answers(
    tmp_path: Path, num_workers: int
) -> None:
    held = tmp_path / "held"
    held.touch()
    with (
        running(
            tmp_path,
            engine={"held_by": str(held)},
            num_workers=num_workers,
            num_engines=2,
            restarts=True,
        ) as server,
        connections(server, 8) as clients,
    ):
        others, before = workers(server), engine_pids(server)
        thread, answers = in_background(server, clients, ENDLESS | {"max_tokens": 30})
        requests = engine_of(server)
        victim = next(iter(requests))
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: "is ready again" in server.said(), 60, "a log line")
        assert thread.is_alive()  # the other engine still holds its requests
        assert all(each.get("/ready").status_code == 200 for each in clients)
        (successor,) = engine_pids(server) - before
        held.unlink()
        thread.join(60)
        texts = [each.text for each in answers]
        num_failed = sum('"code": "engine_dead"' in text for text in texts)
        num_whole = sum('"finish_reason":"length"' in text for text in texts)
        assert (num_failed, num_whole) == (requests[victim], 8 - requests[victim])

        def all_answer() -> bool:
            answers = ask_from_all(clients, {"prompt": [5] * 8, "max_tokens": 2})
            assert all(getattr(each, "status_code", 0) == 200 for each in answers)
            return engine_of(server)[successor] > 0

        wait_until(all_answer, 60, "a request of the new engine")
        ids = [note.split()[1] for note in server.notes() if note.startswith("submit")]
        assert len(set(ids)) == len(ids), "the new engine got ids of the old one"
        server.process.send_signal(signal.SIGTERM)
        assert all_ended(server, others) == 0
        assert server.notes().count("drained") == 2


@pytest.mark.slow
def test_replica_that_cannot_start_again_ends_the_server(tmp_path: Path) -> None:
    failing = tmp_path / "failing"
    engine = {"fails": "no memory", "fails_with": str(failing)}
    with running(tmp_path, engine=engine, num_engines=2, restarts=True) as server:
        failing.touch()
        os.kill(min(engine_pids(server)), signal.SIGKILL)
        assert server.process.wait(60) == 1
        assert "of 2 died: no memory" in server.complaints()
