"""The rates over the last seconds, and the statistics line."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from tokenspeed_server.replicas.engines import EngineReplicas
from tokenspeed_server.service import Options, Service
from tokenspeed_server.statistics import EngineMonitors

from tokenspeed_core.engine.messages import Heartbeat
from tokenspeed_core.engine.stats import EngineStats, HistogramCounts


def heartbeat(num_steps: int, num_running: int = 0, num_preemptions: int = 0) -> Heartbeat:
    """Return a heartbeat after steps of 10 ms, each with 4 output tokens."""
    times = HistogramCounts((num_steps,), num_steps * 0.01)
    empty = HistogramCounts((0,), 0.0)
    stats = EngineStats(
        num_preemptions=num_preemptions,
        num_prompt_tokens=num_steps,
        num_prefill_tokens=num_steps,
        num_output_tokens=4 * num_steps,
        num_prefix_queries=2 * num_steps,
        num_prefix_hits=num_steps,
        num_free_pages=50,
        num_cached_pages=30,
        num_held_pages=15,
        num_pending_pages=5,
        step=times,
        host=times,
        queue=empty,
        prefill=empty,
    )
    return Heartbeat(num_steps, num_running, 0, False, stats)


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_rates_cover_the_last_ten_seconds() -> None:
    clock = Clock()
    monitor = EngineMonitors(clock=clock)
    assert monitor.as_json() == {}
    for second in range(31):
        clock.now = float(second)
        monitor.add(0, heartbeat(100 * second if second > 20 else 0, num_running=1))
    found = monitor.as_json()
    assert found["window"]["seconds"] == 10
    assert found["window"]["output_tokens_per_s"] == pytest.approx(4 * 3000 / 10)
    assert found["window"]["step_seconds"] == pytest.approx(0.01)
    assert found["window"]["prefix_hit_rate"] == 0.5
    assert found["kv_cache"]["usage"] == 0.2
    assert found["totals"]["steps"] == 3000


def test_restarted_engine_begins_a_new_window() -> None:
    clock = Clock()
    monitor = EngineMonitors(clock=clock)
    monitor.add(0, heartbeat(1000))
    clock.now = 1.0
    monitor.add(0, heartbeat(3))
    assert monitor.as_json()["window"]["output_tokens_per_s"] == 0


def test_statistics_line_comes_only_while_requests_run(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tokenspeed.statistics")
    clock = Clock()
    monitor = EngineMonitors(clock=clock)
    monitor.log_every(10)
    for second in range(100):
        clock.now = float(second)
        is_busy = 20 <= second < 55
        monitor.add(
            0, heartbeat(100 * second, num_running=2 if is_busy else 0, num_preemptions=second)
        )
    lines = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    assert len(lines) == 3
    assert all(line["running"] == 2 for line in lines)
    assert all(line["output_tokens_per_s"] == pytest.approx(400) for line in lines)
    assert lines[0]["preemptions"] == 10


def test_engine_that_died_has_no_numbers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tokenspeed.statistics")
    clock = Clock()
    monitor = EngineMonitors(2, clock)
    monitor.log_every(10)
    for second in range(30):
        clock.now = float(second)
        monitor.add(0, heartbeat(100 * second, num_running=1))
        if second == 15:
            monitor.forget(1)
            assert monitor.last[1] is None
            found = monitor.as_json()
            assert found["requests"] == {"running": 1, "waiting": 0}
            assert found["replicas"][1] is None
        if second != 15:  # the successor begins with step 0
            monitor.add(1, heartbeat(100 * (second % 16), num_running=3))
    lines = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    assert len(lines) == 2
    assert all(line["output_tokens_per_s"] == pytest.approx(800) for line in lines)


def test_death_of_a_replica_clears_its_numbers(tmp_path: Path) -> None:
    async def run() -> None:
        replicas = EngineReplicas([f"ipc://{tmp_path}/{name}" for name in ("first", "second")])
        monitor = Service(Options(model_name="tiny"), replicas).observability.monitor
        for client in replicas.clients:
            client.receive(heartbeat(100, num_running=1))
        assert all(monitor.last)
        replicas.clients[1].die("killed")
        await asyncio.sleep(0)
        assert [bool(sample) for sample in monitor.last] == [True, False]
        replicas.close()

    asyncio.run(run())
