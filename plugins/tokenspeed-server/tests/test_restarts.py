"""--restart-engine starts a server again that was ready, but not one that fails over and over."""

from __future__ import annotations

from typing import Any

import pytest
from tokenspeed_server import serve
from tokenspeed_server.serve import MAX_RESTARTS, RESTART_SECONDS, Restarts
from tokenspeed_server.settings import ServerConfig

from tokenspeed_core.commands.serving import EngineDeadError


def test_ready_server_restarts_on_its_port() -> None:
    restarts = Restarts(lambda: 0.0)
    restarts.port = 8123
    assert restarts.next_port(True) == 8123
    assert restarts.next_port(True) is None  # the second run did not become ready


def test_server_does_not_restart_unasked() -> None:
    restarts = Restarts(lambda: 0.0)
    restarts.port = 8123
    assert restarts.next_port(False) is None


def test_server_that_fails_often_stays_down() -> None:
    now = [0.0]
    restarts = Restarts(lambda: now[0])

    def fail() -> int | None:
        restarts.port = 1
        return restarts.next_port(True)

    assert [fail() for _ in range(MAX_RESTARTS + 1)] == [1] * MAX_RESTARTS + [None]
    now[0] += RESTART_SECONDS
    assert fail() == 1


def test_engines_and_the_server_share_the_number_of_restarts() -> None:
    restarts = Restarts(lambda: 0.0)
    assert [restarts.count_one() for _ in range(MAX_RESTARTS + 1)] == [True] * MAX_RESTARTS + [
        False
    ]
    restarts.port = 8123
    assert restarts.next_port(True) is None


def test_dead_engine_is_followed_by_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []

    def run_once(config: ServerConfig, catalog: Any, hooks: Any, restarts: Restarts) -> int:
        runs.append(config.port)
        restarts.port = 8123
        if len(runs) < 3:
            raise EngineDeadError("the engine died")
        return 0

    monkeypatch.setattr(serve, "_run_once", run_once)
    assert serve.run(ServerConfig(port=0, restart_engine=True)) == 0
    assert runs == [0, 8123, 8123]
    runs.clear()
    with pytest.raises(EngineDeadError):
        serve.run(ServerConfig(port=0))
