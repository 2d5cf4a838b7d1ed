"""The client with correct and misbehaving servers."""

from __future__ import annotations

import asyncio
import os
import time

import pytest
from misbehaving import STREAM, Exchange, good, serving
from tokenspeed_bench import online
from tokenspeed_bench import result as results
from tokenspeed_bench.client import Answers, LoadOptions, run
from tokenspeed_bench.connection import Target
from tokenspeed_bench.metrics import Record
from tokenspeed_bench.mock_server import client_cost
from tokenspeed_bench.traffic import AgentShape, Session, Turn, agents, load

ONE = LoadOptions(1, None, 1)


def ask(
    url: str, num: int = 1, pace: LoadOptions = ONE, timeout: float = 20.0, out_len: int = 4
) -> Answers:
    return run(
        Target(url, "m", "secret", timeout), load(num, 10, out_len, is_fixed=True).sessions, pace
    )


def test_every_request_is_answered_and_counted() -> None:
    with serving(good) as fake:
        answers = ask(fake.url, num=10, pace=LoadOptions(3, None, 2))
    assert answers.failures == []
    assert len(answers.records) == 10
    for record in answers.records:
        assert len(record.events) == record.num_tokens == 4
        assert (record.num_prompt, record.num_cached) == (10, 5)
        assert [record.sent, *record.events, record.done] == sorted(
            [record.sent, *record.events, record.done]
        )
    bodies = [exchange.body for exchange in fake.exchanges]
    expected = load(10, 10, 4, is_fixed=True).sessions
    assert sorted(body["prompt"] for body in bodies) == sorted(session.ids for session in expected)
    assert {exchange.headers["authorization"] for exchange in fake.exchanges} == {"Bearer secret"}
    assert all(
        body["ignore_eos"] and body["stream"] and body["temperature"] == 0 for body in bodies
    )


def test_events_split_over_reads_are_counted() -> None:
    async def one_byte_at_a_time(exchange: Exchange) -> None:
        exchange.writer.write(STREAM)
        event = b'data: {"choices":[{"index":0,"text":" a"}]}\n\n'
        data = b"%x\r\n%s\r\n" % (len(event), event)
        for byte in data * 3:
            exchange.writer.write(bytes([byte]))
            await exchange.writer.drain()
            await asyncio.sleep(0.0002)
        exchange.end(3)

    with serving(one_byte_at_a_time) as fake:
        (record,) = ask(fake.url).records
    assert len(record.events) == record.num_tokens == 3


def test_events_have_arrival_times() -> None:
    async def pauses(exchange: Exchange) -> None:
        exchange.writer.write(STREAM)
        await exchange.tokens(2, 0.5)  # events of one read would share a time
        exchange.end(2)

    with serving(pauses) as fake:
        (record,) = ask(fake.url).records
    assert record.sent < record.events[0] < record.events[1] < record.done


def test_events_without_space_and_usage_on_last_event_count() -> None:
    async def terse(exchange: Exchange) -> None:
        exchange.writer.write(STREAM)
        exchange.chunk(b'data:{"choices":[{"text":"a"}]}\n\n' * 2)
        exchange.chunk(
            b'data:{"choices":[{"text":"b"}],"usage":{"completion_tokens":3,"prompt_tokens":10}}\n\n'
        )
        exchange.chunk(b"data: [DONE]\n\n")
        exchange.writer.write(b"0\r\n\r\n")

    with serving(terse) as fake:
        (record,) = ask(fake.url).records
    assert len(record.events) == record.num_tokens == 3
    assert record.num_cached is None


def test_stream_ended_by_closing_counts_as_answer() -> None:
    async def closes_at_the_end(exchange: Exchange) -> None:
        exchange.writer.write(
            b"HTTP/1.0 200 OK\r\n\r\n" + b'data: {"choices":[{"text":"a"}]}\n\n' * 4
        )
        exchange.writer.write(b"data: [DONE]\n\n")
        await exchange.writer.drain()
        exchange.writer.close()

    with serving(closes_at_the_end) as fake:
        answers = ask(fake.url, num=2)
    assert answers.failures == []
    assert [record.num_tokens for record in answers.records] == [4, 4]


def test_stream_error_fails_only_its_request() -> None:
    async def breaks(exchange: Exchange) -> None:
        if exchange.number:
            return await good(exchange)
        exchange.writer.write(STREAM)
        await exchange.tokens(2)
        exchange.event({"error": {"message": "the device is gone", "code": None}})
        exchange.chunk(b"data: [DONE]\n\n")
        exchange.writer.write(b"0\r\n\r\n")
        return None

    with serving(breaks) as fake:
        answers = ask(fake.url, num=2)
    assert answers.failures == ["the stream ended in an error: the device is gone"]
    assert len(answers.records) == 1


def test_http_error_fails_the_request() -> None:
    async def refuses(exchange: Exchange) -> None:
        exchange.refuse("429 Too Many Requests", "the queue is full")

    with serving(refuses) as fake:
        answers = ask(fake.url, num=3)
    assert answers.failures == ["429 Too Many Requests: the queue is full"] * 3
    assert answers.records == []


def test_connection_closed_early_fails_the_request() -> None:
    async def closes_early(exchange: Exchange) -> None:
        exchange.writer.write(STREAM)
        await exchange.tokens(2, 0.01)
        await exchange.writer.drain()
        exchange.writer.close()

    with serving(closes_early) as fake:
        assert ask(fake.url).failures == ["the server closed the connection after 2 events"]


def test_closed_connection_without_answer_is_reported() -> None:
    async def closes(exchange: Exchange) -> None:
        exchange.writer.close()

    with serving(closes) as fake:
        assert ask(fake.url).failures == ["the server closed the connection without an answer"]


def test_closed_idle_connection_is_reopened() -> None:
    async def closes_after_each_answer(exchange: Exchange) -> None:
        await good(exchange)
        await exchange.writer.drain()
        await asyncio.sleep(0.05)
        exchange.writer.close()

    turns = tuple(Turn(5 + i, 2, 0.2 * (i > 0)) for i in range(3))
    with serving(closes_after_each_answer) as fake:
        answers = run(Target(fake.url, "m"), [Session(list(range(1000, 1010)), turns)], ONE)
    assert answers.failures == []
    assert [record.turn for record in answers.records] == [0, 1, 2]


def test_hanging_server_times_out() -> None:
    async def hangs(exchange: Exchange) -> None:
        exchange.writer.write(STREAM)
        await exchange.tokens(1)
        await asyncio.sleep(60)

    begin = time.monotonic()
    with serving(hangs) as fake:
        answers = ask(fake.url, timeout=0.5)
    assert len(answers.failures) == 1
    assert "0.5 s" in answers.failures[0]
    assert time.monotonic() - begin < 55


def test_stream_without_tokens_fails_the_request() -> None:
    async def empty(exchange: Exchange) -> None:
        exchange.writer.write(STREAM)
        exchange.end(0)

    with serving(empty) as fake:
        assert ask(fake.url).failures == ["the stream ended without a token"]


def test_unreachable_server_fails_every_request() -> None:
    answers = ask("http://127.0.0.1:9", num=4, pace=LoadOptions(2, None, 2))
    assert len(answers.failures) == 4
    assert all("no connection to http://127.0.0.1:9" in failure for failure in answers.failures)


def test_failed_turn_ends_its_session() -> None:
    async def fails_from_the_second_turn(exchange: Exchange) -> None:
        if len(exchange.body["prompt"]) > 50:
            exchange.refuse("400 Bad Request", "too long")
        else:
            await good(exchange)

    shape = AgentShape(1, 50, 10, 5, 2, min_turns=4, max_turns=4, pause_scale=0.001)
    with serving(fails_from_the_second_turn) as fake:
        answers = run(Target(fake.url, "m"), agents(shape).sessions, ONE)
    assert len(answers.records) == 1
    assert (
        answers.failures == ["400 Bad Request: too long"] + ["not sent: an earlier turn failed"] * 2
    )


def test_arrivals_do_not_wait_for_answers() -> None:
    all_arrived = asyncio.Event()

    async def waits_for_the_last_request(exchange: Exchange) -> None:
        if exchange.number == 11:
            all_arrived.set()
        await all_arrived.wait()
        await good(exchange)

    with serving(waits_for_the_last_request) as fake:
        answers = ask(fake.url, num=12, pace=LoadOptions(1, 60.0, 2))
    assert (len(answers.records), answers.failures) == (12, [])


def test_salt_is_sent_only_if_set() -> None:
    with serving(good) as fake:
        run(Target(fake.url, "m"), load(1, 5, 2, is_fixed=True).sessions, ONE)
        run(Target(fake.url, "m", salt="x"), load(1, 5, 2, is_fixed=True).sessions, ONE)
    plain, salted = (exchange.body for exchange in fake.exchanges)
    assert "cache_salt" not in plain
    assert salted["cache_salt"] == "x"


def test_client_cost_matches_the_mock_server() -> None:
    cost = client_cost(LoadOptions(4, None, 2))
    assert cost["users"] == 4
    assert cost["itl_p99_ms"] >= 4.0
    assert 100 < cost["events_per_s"] <= 4 / 0.005 * 1.05


@pytest.mark.parametrize("path", ["", "/prefix", "/prefix/"])
def test_path_of_the_url_is_kept(path: str) -> None:
    assert (
        Target(f"http://h:1{path}", "m")
        .head()
        .startswith(f"POST {path.rstrip('/')}/v1/completions HTTP".encode())
    )


def test_dead_client_loses_only_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original_body = Target.body

    def body(target: Target, prompt: bytes, out_len: int) -> bytes:
        if prompt == ", ".join(map(str, fatal)).encode():
            os._exit(7)
        return original_body(target, prompt, out_len)

    fatal = load(4, 10, 4, is_fixed=True).sessions[1].ids
    monkeypatch.setattr(Target, "body", body)
    with serving(good) as fake:
        answers = ask(fake.url, num=4, pace=LoadOptions(2, None, 2))
    assert len(answers.records) == 2
    assert answers.failures == ["a client process ended with exit code 7"]


def test_requests_lost_with_a_client_count_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    half = Answers(
        [Record(0.0, [0.1, 0.2], 2, 0.2)] * 2, ["a client process ended with exit code 7"]
    )
    monkeypatch.setattr(online, "run", lambda *given: half)
    result = results.new("serve", "m", None, {})
    plan = online.Online(
        [online.Load(load(8, 10, 2, is_fixed=True), ONE)], {"ttft": 1e3}, measures_client=False
    )
    online.measure(Target("http://h", "m"), plan, result, lambda run: None)
    figures = result["runs"][-1]["figures"]
    assert (figures["answered"], figures["failed"], figures["good_share"]) == (2, 6, 0.25)
