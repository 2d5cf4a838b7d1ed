"""Metrics: counted in shared memory, served to Prometheus for all API workers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families as parse_text
from server_support import running, wait_until
from tokenspeed_server.metrics import HISTOGRAMS, MetricsMemory, WorkerMetrics, merged

from tokenspeed_core.api.hooks import RequestRecord
from tokenspeed_core.engine.messages import WORKER_SHIFT
from tokenspeed_core.engine.stats import Histogram

DEFAULTS = {"model_name": "fake", "engine": "0"}


def sample(page: str, name: str, **labels: str) -> float:
    """Return the value of one sample of a page."""
    for family in parse_text(page):
        for each in family.samples:
            if each.name == f"tokenspeed:{name}" and labels.items() <= each.labels.items():
                return each.value
    raise AssertionError(f"no {name} {labels}")


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 4))))
def test_each_value_is_in_the_bucket_of_its_bound(values: list[tuple[float, int]]) -> None:
    bounds = (0.5, 1.0, 5.0)
    histogram = Histogram(bounds)
    for value, times in values:
        histogram.observe(value, times)
    counts = histogram.snapshot().counts
    assert sum(counts) == sum(times for _, times in values)
    for i, bound in enumerate(bounds):
        expected = sum(times for value, times in values if value <= bound)
        assert sum(counts[: i + 1]) == expected
    assert histogram.snapshot().total == pytest.approx(sum(v * n for v, n in values))


def test_workers_count_in_shared_memory() -> None:
    memory = MetricsMemory(2)
    other = MetricsMemory(2, memory.fd)  # as in another process
    record = RequestRecord("r", 10, 0, 5, "stop", 0.25, 1.25)
    first, second = WorkerMetrics(memory.row(0)), WorkerMetrics(other.row(1))
    first.observe_request(record)
    second.observe_request(record)
    second.observe_status(418)
    second.inter_token_latency.observe(0.004, 3)
    first.flush()
    second.flush()
    rows = memory.rows()
    for name in HISTOGRAMS:
        expected = {"time_to_first_token": 0, "inter_token_latency": 3}.get(name, 2)
        assert sum(merged(rows, name).counts) == expected, name
    assert merged(rows, "e2e_request_latency").total == 2.5
    assert merged(rows, "time_per_output_token").total == pytest.approx(0.5)
    assert [row.finish_reasons()["stop"] for row in rows] == [1, 1]
    assert [sum(row.statuses().values()) for row in rows] == [0, 1]


@pytest.mark.slow
def test_one_scrape_shows_all_workers(tmp_path: Path) -> None:
    body: dict[str, Any] = {"prompt": [70, 71], "max_tokens": 5}
    with running(tmp_path, num_workers=2, has_metrics=True) as server:
        for _ in range(12):  # a connection each, so that both workers answer some
            with server.client() as client:
                assert client.post("/v1/completions", json=body).status_code == 200
                client.post("/v1/completions", json={**body, "n": "x"})
        pages = []
        for _ in range(6):
            with server.client() as client:
                wait_until(
                    lambda client=client: (
                        sample(client.get("/metrics").text, "http_responses_total", status="400")
                        == 12
                    ),
                    30,
                    "the numbers of both workers",
                )
                pages.append(client.get("/metrics"))
        numbers = re.findall(r"submit (\d+)", server.log.read_text())
        assert len({int(number) >> WORKER_SHIFT for number in numbers}) == 2
    for page in pages:
        assert page.headers["content-type"].startswith("text/plain")
        assert sample(page.text, "request_success_total", finished_reason="length") == 12
        assert sample(page.text, "http_responses_total", status="400") == 12
        assert sample(page.text, "time_to_first_token_seconds_count") == 12
        assert sample(page.text, "inter_token_latency_seconds_count") == 12 * 4
        assert sample(page.text, "request_generation_tokens_sum") == 12 * 5


@pytest.mark.slow
def test_heartbeat_carries_engine_statistics(tmp_path: Path) -> None:
    with running(tmp_path, has_metrics=True) as server, server.client() as client:
        wait_until(lambda: "kv_cache" in client.get("/v1/stats").json(), 30, "a heartbeat")
        stats = client.get("/v1/stats").json()
        page = client.get("/metrics").text
        assert sample(page, "num_preemptions_total") == stats["totals"]["preemptions"] == 7
        assert sample(page, "kv_cache_usage_perc") == stats["kv_cache"]["usage"] == 0.5
        assert sample(page, "kv_cache_pages", state="cached") == 30
        assert sample(page, "spec_decode_num_drafts_total") == 4
        assert sample(page, "spec_decode_num_draft_tokens_total") == 12
        assert sample(page, "spec_decode_num_accepted_tokens_total") == 5
        name = "spec_decode_num_accepted_tokens_per_pos_total"
        assert [sample(page, name, position=str(i)) for i in range(2)] == [3, 2]
        name = "spec_decode_num_draft_tokens_per_pos_total"
        assert [sample(page, name, position=str(i)) for i in range(3)] == [4, 4, 4]
        assert sample(page, "spec_decode_draft_tokens_per_row") == 3
        assert sample(page, "spec_decode_paused") == 1
        assert sample(page, "spec_decode_budget_steps") == -1.5
        assert sample(page, "num_requests_running") == stats["requests"]["running"] == 0
        assert stats["engine"] == "ready"
        accept = {"accept": "application/openmetrics-text; version=1.0.0"}
        page = client.get("/metrics", headers=accept).text
        names = {each.name for family in parse_text(page) for each in family.samples}
        assert all(name.startswith("tokenspeed:") for name in names)
