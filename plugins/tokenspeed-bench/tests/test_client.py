"""The client against a server that answers, and against one that misbehaves."""

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


def test_events_are_counted_however_reads_cut_them() -> None:
    async def dribble(exchange: Exchange) -> None:
        exchange.writer.write(STREAM)
        event = b'data: {"choices":[{"index":0,"text":" a"}]}\n\n'
        data = b"%x\r\n%s\r\n" % (len(event), event)
        for byte in data * 3:
            exchange.writer.write(bytes([byte]))
            await exchange.writer.drain()
            await asyncio.sleep(0.0002)
        exchange.end(3)

    with serving(dribble) as fake:
        (record,) = ask(fake.url).records
    assert len(record.events) == record.num_tokens == 3


def test_an_event_has_the_time_at_which_it_came() -> None:
    async def pauses(exchange: Exchange) -> None:
        exchange.writer.write(STREAM)
        await exchange.tokens(2, 0.5)  # events that one read brings have one time
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


def test_a_stream_that_ends_by_closing_is_an_answer() -> None:
    async def old(exchange: Exchange) -> None:
        exchange.writer.write(
            b"HTTP/1.0 200 OK\r\n\r\n" + b'data: {"choices":[{"text":"a"}]}\n\n' * 4
        )
        exchange.writer.write(b"data: [DONE]\n\n")
        await exchange.writer.drain()
        exchange.writer.close()

    with serving(old) as fake:
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


def test_a_connection_that_closes_early_fails_the_request() -> None:
    async def leaves(exchange: Exchange) -> None:
        exchange.writer.write(STREAM)
        await exchange.tokens(2, 0.01)
        await exchange.writer.drain()
        exchange.writer.close()

    with serving(leaves) as fake:
        assert ask(fake.url).failures == ["the server closed the connection after 2 events"]


def test_closed_connection_without_answer_is_reported() -> None:
    async def closes(exchange: Exchange) -> None:
        exchange.writer.close()

    with serving(closes) as fake:
        assert ask(fake.url).failures == ["the server closed the connection without an answer"]


def test_closed_idle_connection_is_reopened() -> None:
    async def once_each(exchange: Exchange) -> None:
        await good(exchange)
        await exchange.writer.drain()
        await asyncio.sleep(0.05)
        exchange.writer.close()

    turns = tuple(Turn(5 + i, 2, 0.2 * (i > 0)) for i in range(3))
    with serving(once_each) as fake:
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


def test_a_stream_without_a_token_is_no_answer() -> None:
    async def empty(exchange: Exchange) -> None:
        exchange.writer.write(STREAM)
        exchange.end(0)

    with serving(empty) as fake:
        assert ask(fake.url).failures == ["the stream ended without a token"]


def test_nobody_there_fails_every_request_and_hangs_none() -> None:
    answers = ask("http://127.0.0.1:9", num=4, pace=LoadOptions(2, None, 2))
    assert len(answers.failures) == 4
    assert all("no connection to http://127.0.0.1:9" in failure for failure in answers.failures)


def test_failed_turn_ends_its_session() -> None:
    async def fails_at_the_second(exchange: Exchange) -> None:
        if len(exchange.body["prompt"]) > 50:
            exchange.refuse("400 Bad Request", "too long")
        else:
            await good(exchange)

    shape = AgentShape(1, 50, 10, 5, 2, min_turns=4, max_turns=4, pause_scale=0.001)
    with serving(fails_at_the_second) as fake:
        answers = run(Target(fake.url, "m"), agents(shape).sessions, ONE)
    assert len(answers.records) == 1
    assert (
        answers.failures == ["400 Bad Request: too long"] + ["not sent: an earlier turn failed"] * 2
    )


def test_arrivals_do_not_wait_for_answers() -> None:
    all_are_there = asyncio.Event()

    async def answers_none_before_the_last(exchange: Exchange) -> None:
        if exchange.number == 11:
            all_are_there.set()
        await all_are_there.wait()
        await good(exchange)

    with serving(answers_none_before_the_last) as fake:
        answers = ask(fake.url, num=12, pace=LoadOptions(1, 60.0, 2))
    assert (len(answers.records), answers.failures) == (12, [])


def test_the_salt_is_sent_only_where_there_is_one() -> None:
    with serving(good) as fake:
        run(Target(fake.url, "m"), load(1, 5, 2, is_fixed=True).sessions, ONE)
        run(Target(fake.url, "m", salt="x"), load(1, 5, 2, is_fixed=True).sessions, ONE)
    plain, salted = (exchange.body for exchange in fake.exchanges)
    assert "cache_salt" not in plain
    assert salted["cache_salt"] == "x"


def test_the_clients_own_cost_is_that_of_a_beat() -> None:
    cost = client_cost(LoadOptions(4, None, 2))
    assert cost["users"] == 4
    assert cost["itl_p99_ms"] >= 4.0
    assert 100 < cost["events_per_s"] <= 4 / 0.005 * 1.05


@pytest.mark.parametrize("path", ["", "/prefix", "/prefix/"])
def test_a_servers_path_is_kept(path: str) -> None:
    assert (
        Target(f"http://h:1{path}", "m")
        .head()
        .startswith(f"POST {path.rstrip('/')}/v1/completions HTTP".encode())
    )


def test_dead_client_loses_only_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = Target.body

    def body(target: Target, prompt: bytes, out_len: int) -> bytes:
        if prompt == ", ".join(map(str, fatal)).encode():
            os._exit(7)
        return whole(target, prompt, out_len)

    fatal = load(4, 10, 4, is_fixed=True).sessions[1].ids
    monkeypatch.setattr(Target, "body", body)
    with serving(good) as fake:
        answers = ask(fake.url, num=4, pace=LoadOptions(2, None, 2))
    assert len(answers.records) == 2
    assert answers.failures == ["a client process ended with 7"]


def test_all_requests_that_a_dead_client_lost_are_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    half = Answers([Record(0.0, [0.1, 0.2], 2, 0.2)] * 2, ["a client process ended with 7"])
    monkeypatch.setattr(online, "run", lambda *given: half)
    result = results.new("serve", "m", None, {})
    plan = online.Online(
        [online.Load(load(8, 10, 2, is_fixed=True), ONE)], {"ttft": 1e3}, measures_client=False
    )
    online.measure(Target("http://h", "m"), plan, result, lambda run: None)
    figures = result["runs"][-1]["figures"]
    assert (figures["answered"], figures["failed"], figures["good_share"]) == (2, 6, 0.25)
