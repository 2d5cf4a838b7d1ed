"""The command `tokenspeed run-batch`: lines, order, errors, and its end."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import TEMPLATE, TOKENIZER, http, scripted
from tokenspeed_server import asgi
from tokenspeed_server.batch.files import readable_write_errors
from tokenspeed_server.batch.lines import LineError, parse_line, read_lines
from tokenspeed_server.batch.offline import Batch
from tokenspeed_server.batch.runner import BatchRunner
from tokenspeed_server.service import Options
from tokenspeed_server.settings import ServerConfig

from tokenspeed_core.cli import main
from tokenspeed_core.commands.serving import ConfigError, Defaults, EngineDeadError, Hooks, Program
from tokenspeed_core.engine.factory import discover
from tokenspeed_core.engine.inputs import ModelText
from tokenspeed_core.text import ChatTemplate

MESSAGES = [{"role": "user", "content": "hello"}]
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hello", "max_tokens": 5},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 50},
}
FAKE_ENGINE = Path(__file__).parent / "fake_engine.py"


def line(custom_id: str, url: str = "/v1/completions", **changes: Any) -> bytes:
    body = {**BODIES.get(url, {}), **changes}
    value = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
    return json.dumps(value).encode() + b"\n"


def results(output: io.BytesIO | Path) -> list[dict[str, Any]]:
    data = output.read_bytes() if isinstance(output, Path) else output.getvalue()
    return [json.loads(each) for each in data.splitlines()]


def answer(lines: list[bytes], *replies: str, concurrency: int = 4) -> list[dict[str, Any]]:
    async def run() -> list[dict[str, Any]]:
        with scripted(*replies, logs_exchanges=False) as (app, _):
            output = io.BytesIO()
            reading = read_lines(io.BytesIO(b"".join(lines)), 10_000)
            runner = BatchRunner(partial(asgi.post, app), reading, output, concurrency=concurrency)
            assert await runner.run(asyncio.get_running_loop().create_future())
            found = results(output)
            num_good = sum((each["response"] or {}).get("status_code") == 200 for each in found)
            assert runner.counts.num_answered == num_good
            assert runner.counts.num_failed == len(found) - num_good
            return found

    return asyncio.run(run())


def without_ids(body: Any) -> Any:
    """Return an answer without ids and times, which differ between requests."""
    if isinstance(body, dict):
        changing = ("id", "created", "created_at", "completed_at")
        return {key: without_ids(value) for key, value in body.items() if key not in changing}
    return [without_ids(each) for each in body] if isinstance(body, list) else body


@pytest.mark.parametrize("url", BODIES)
def test_answers_equal_those_of_the_server(url: str) -> None:
    async def ask() -> Any:
        with scripted("hello world") as (app, _):
            async with http(app) as client:
                return (await client.post(url, json=BODIES[url])).json()

    (result,) = answer([line("a", url)], "hello world")
    assert result["custom_id"] == "a"
    assert result["error"] is None
    assert result["response"]["status_code"] == 200
    assert result["response"]["request_id"]
    assert without_ids(result["response"]["body"]) == without_ids(asyncio.run(ask()))


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40), concurrency=st.integers(1, 9))
def test_results_have_the_order_of_the_lines(lengths: list[int], concurrency: int) -> None:
    lines = [line(str(i), max_tokens=length) for i, length in enumerate(lengths)]
    found = answer(lines, "hello " * 50, concurrency=concurrency)
    assert [each["custom_id"] for each in found] == [str(i) for i in range(len(lengths))]
    usages = [each["response"]["body"]["usage"]["completion_tokens"] for each in found]
    assert usages == lengths


def test_bad_lines_get_errors_and_the_others_answers() -> None:
    found = answer(
        [
            b"nonsense\n",
            line("a"),
            b"\n",
            b"  \r\n",
            b"[]\n",
            line("a"),
            line(""),
            line("b", "/v1/embeddings"),
            line("b"),
            line("c", "/v1/chat/completions", stream=True),
            b'{"custom_id": "d", "method": "GET", "url": "/v1/completions", "body": {}}\n',
            b'{"custom_id": "e", "url": "/v1/completions", "body": []}\n',
            line("f", prompt="x" * 20_000),
            line("g", temperature=-1),
            line("h", model="other"),
            line("i").rstrip(b"\n"),
        ]
    )
    codes = [each["error"] and each["error"]["code"] for each in found]
    assert codes == [
        "invalid_json",
        None,
        "invalid_line",
        "duplicate_custom_id",
        "invalid_custom_id",
        "invalid_url",
        "duplicate_custom_id",
        "invalid_body",
        "invalid_method",
        "invalid_body",
        "line_too_long",
        None,
        None,
        None,
    ]
    statuses = [each["response"] and each["response"]["status_code"] for each in found]
    assert statuses == [None, 200, *[None] * 9, 400, 404, 200]
    assert [each["custom_id"] for each in found[5:10]] == ["b", "b", "c", "d", "e"]


def test_valid_lines_after_many_invalid_lines_are_answered() -> None:
    bad = [b"nonsense\n"] * 100  # more than wait for an answer at once
    found = answer([*bad, line("a"), *bad, line("b")], concurrency=1)
    assert len(found) == 202
    assert [each["custom_id"] for each in found if each["custom_id"]] == ["a", "b"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_reported_with_the_file() -> None:
    full = Path("/dev/full")
    with (
        pytest.raises(ConfigError, match=str(full)),
        readable_write_errors(full),
        full.open("wb") as writing,
    ):
        writing.write(b"x")


@given(st.binary(max_size=200))
def test_any_line_is_a_request_or_an_error(data: bytes) -> None:
    with suppress(LineError):
        assert parse_line(data).custom_id


def test_full_queue_is_retried() -> None:
    statuses = [429, 429, 200]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"Retry-After", b"0")]
        status = statuses.pop(0)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})

    async def run() -> list[dict[str, Any]]:
        output = io.BytesIO()
        runner = BatchRunner(partial(asgi.post, app), iter([line("a")]), output, concurrency=1)
        assert await runner.run(asyncio.get_running_loop().create_future())
        return results(output)

    assert asyncio.run(run())[0]["response"]["status_code"] == 200
    assert not statuses


def batch(tmp_path: Path, num_engines: int = 1, **engine: Any) -> tuple[Batch, Path, Path]:
    """Return a batch on fake engine processes, with its input and output."""
    fake = {"vocab_size": 400, "log": str(tmp_path / "log"), **engine}
    program = Program([sys.executable, str(FAKE_ENGINE)], {"config": fake})
    config = ServerConfig()
    options = Options("fake", logs_exchanges=False)
    made = Batch([program] * num_engines, options, Hooks.load(discover(config)), concurrency=2)
    return made, tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def load_text() -> ModelText:
    template = ChatTemplate(TEMPLATE, TOKENIZER.special_tokens)
    return ModelText(TOKENIZER, template, Defaults(eos_token_ids=(0,)))


def run_batch(made: Batch, source: Path, target: Path) -> bool:
    with source.open("rb") as reading, target.open("wb") as writing:
        return asyncio.run(made.run(load_text, reading, writing))


def test_engine_process_answers_and_ends(tmp_path: Path) -> None:
    made, source, target = batch(tmp_path)
    source.write_bytes(line("a", prompt=[70, 71], max_tokens=3) + line("b"))
    assert run_batch(made, source, target)
    assert [each["custom_id"] for each in results(target)] == ["a", "b"]
    assert made.counts.num_answered == 2
    assert "drained" in (tmp_path / "log").read_text()


def test_interrupt_keeps_finished_answers(tmp_path: Path) -> None:
    made, source, target = batch(tmp_path, step_seconds=0.01)
    endless = line("b", prompt=[394, 70], max_tokens=500)
    source.write_bytes(line("a", max_tokens=1) + endless + line("c", max_tokens=2) + endless)

    class Writing(io.FileIO):
        """Interrupts this process after the first result."""

        def write(self, data: Any) -> int:
            os.kill(os.getpid(), signal.SIGINT)
            return super().write(data)

    with source.open("rb") as reading, Writing(target, "w") as writing:
        assert not asyncio.run(made.run(load_text, reading, writing))
    ids = [each["custom_id"] for each in results(target)]
    assert ids[0] == "a"
    assert "b" not in ids


@pytest.mark.parametrize("num_engines", [1, 2])
def test_dead_engine_ends_the_batch(
    tmp_path: Path, num_engines: int, caplog: pytest.LogCaptureFixture
) -> None:
    made, source, target = batch(tmp_path, num_engines)
    source.write_bytes(line("a") + line("dies", prompt=[391]) + line("b", max_tokens=400))
    with pytest.raises(EngineDeadError):
        run_batch(made, source, target)
    assert "dies" not in [each["custom_id"] for each in results(target)]
    assert "server exits" not in caplog.text


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["missing.jsonl", "out.jsonl"], "missing.jsonl"),
        ([".", "out.jsonl"], "."),
        (["in.jsonl", "no/such/out.jsonl"], "out.jsonl"),
        (["in.jsonl", "."], "."),
        (["in.jsonl", "old.jsonl"], "--overwrite"),
        (["in.jsonl", "in.jsonl", "--overwrite"], "in.jsonl"),
        (["in.jsonl"], "OUT.jsonl"),
        (["in.jsonl", "out.jsonl", "--no-such-flag"], "--no-such-flag"),
    ],
)
def test_wrong_paths_are_refused_before_the_start(
    words: list[str],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_bytes(line("a"))
    (tmp_path / "old.jsonl").write_text("kept")
    assert main(["run-batch", *words]) == 2
    assert name in capsys.readouterr().err
    assert (tmp_path / "old.jsonl").read_text() == "kept"
    assert not (tmp_path / "out.jsonl").exists()
