"""Start, drain, death and disconnects: every request ends, no process is left."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fake_engine
import httpx
import psutil
import pytest
from server_support import Running, is_alive, running, wait_until
from tokenspeed_server import lifecycle
from tokenspeed_server.listen import listen

from tokenspeed_core.engine.subprocesses import make_private_folder
from tokenspeed_core.errors import CapacityError, ConfigError

pytestmark = pytest.mark.slow

SLOW = {"step_seconds": 0.03}
LONG: dict[str, Any] = {"prompt": [70, 71], "max_tokens": 400}


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder with a short path: pytest's own may be too long for a socket's name."""
    with TemporaryDirectory(prefix="life-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def ended(server: Running, seconds: float = 60.0) -> int:
    """Wait for the server's end, check that it left nothing, and return its status."""
    status = server.process.wait(seconds)
    wait_until(lambda: not is_alive(server.engine_pid()), 60, "the engine's end")
    assert not list(server.log.parent.glob("tokenspeed-*")), "a socket's folder was left behind"
    return status


def in_background(
    server: Running, body: dict[str, Any]
) -> tuple[threading.Thread, list[httpx.Response]]:
    """Send a request from a thread; its answer will be in the list.

    Returns once the engine has the request, and for a stream once its first event has come.
    """
    answers: list[httpx.Response] = []
    has_begun = threading.Event()

    def post() -> None:
        with (
            server.client() as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            has_begun.set()
            response.read()
            answers.append(response)

    thread = threading.Thread(target=post)
    thread.start()
    server.wait_for("submit")
    if body.get("stream"):
        assert has_begun.wait(60)
    return thread, answers


def test_starting_server_answers_503(tmp_path: Path) -> None:
    engine = {"starts_after": str(tmp_path / "go")}
    with running(tmp_path, engine=engine, waits=False) as server, server.client() as client:
        assert client.get("/ready").json()["reason"]
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200, "a server that starts is alive"
        response = client.post("/v1/completions", json=LONG)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "starting")
        assert client.get("/v1/models").status_code == 200
        (tmp_path / "go").touch()
        wait_until(lambda: client.get("/ready").status_code == 200, 30, "healthy")


def test_engine_that_cannot_start_ends_the_server(tmp_path: Path) -> None:
    with running(tmp_path, engine={"fails": "no such weights"}, waits=False) as server:
        assert ended(server) == 1


def test_tokenizer_that_cannot_load_ends_the_server(tmp_path: Path) -> None:
    with running(tmp_path, engine={"start_seconds": 300}, text_fails=True, waits=False) as server:
        assert server.process.wait(60) == 1
        if server.log.exists():  # the engine may have been ended before it wrote a line
            assert not is_alive(server.engine_pid())
        assert not list(tmp_path.glob("*tokenspeed-*"))


def test_folder_of_sockets_is_private(tmp_path: Path) -> None:
    assert make_private_folder(tmp_path).stat().st_mode & 0o777 == 0o700
    with pytest.raises(CapacityError, match="TMPDIR"):
        make_private_folder(tmp_path / "missing")


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.release)]
)
def test_signal_drains(tmp_path: Path, number: signal.Signals) -> None:
    held = tmp_path / "held"
    held.touch()
    with running(tmp_path, engine={"held_by": str(held)}) as server, server.client() as client:
        thread, answers = in_background(server, {**LONG, "max_tokens": 80})
        server.process.send_signal(number)
        wait_until(
            lambda: client.get("/ready").status_code == 503, 60, "not healthy while draining"
        )
        assert client.get("/health").status_code == 200, "a server that drains is alive"
        refused = client.post("/v1/completions", json=LONG)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        held.unlink()
        assert ended(server) == 0
        thread.join()
        assert answers[0].json()["usage"]["completion_tokens"] == 80
        assert "drained" in server.notes()


@pytest.mark.parametrize("streams", [True, pytest.param(False, marks=pytest.mark.release)])
def test_second_signal_ends_at_once(tmp_path: Path, streams: bool) -> None:
    with running(tmp_path, engine={"step_seconds": 0.5}) as server, server.client() as client:
        thread, answers = in_background(server, {**LONG, "stream": streams})
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: client.get("/ready").status_code == 503, 60, "draining")
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert ended(server) == 128 + signal.SIGTERM
        thread.join()
        assert '"code": "stopped"' in answers[0].text
        assert "engine" not in answers[0].text


def test_signal_during_the_start_ends_the_server(tmp_path: Path) -> None:
    with running(tmp_path, engine={"start_seconds": 300}, waits=False) as server:
        wait_until(server.log.exists, 30, "the engine's process")
        server.process.send_signal(signal.SIGTERM)
        assert ended(server) == 0


@pytest.mark.parametrize("streams", [True, pytest.param(False, marks=pytest.mark.release)])
def test_engine_death_fails_requests_and_ends_the_server(tmp_path: Path, streams: bool) -> None:
    with running(tmp_path, engine=SLOW) as server:
        thread, answers = in_background(server, {**LONG, "stream": streams})
        os.kill(server.engine_pid(), signal.SIGKILL)
        thread.join(60)
        if streams:
            assert '"code": "engine_dead"' in answers[0].text.split("\n\n")[-3]
            assert answers[0].text.endswith("data: [DONE]\n\n")
        else:
            assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (
                500,
                "engine_dead",
            )
        assert ended(server) == 1


def test_request_that_kills_the_engine_is_answered(tmp_path: Path) -> None:
    with running(tmp_path) as server, server.client() as client:
        assert (
            client.post("/v1/completions", json={"prompt": [fake_engine.DIES]}).status_code == 500
        )
        assert ended(server) == 1


@pytest.mark.release
def test_stalled_engine_is_unhealthy_within_ten_seconds(tmp_path: Path) -> None:
    with running(tmp_path) as server, server.client() as client:
        thread, _ = in_background_to(server, [fake_engine.STALLS])
        start = time.monotonic()
        wait_until(
            lambda: client.get("/health").status_code == 503, 10 + 3, "unhealthy"
        )  # three for a busy machine
        assert time.monotonic() - start > 3, "a slow step is not a dead engine"
        assert "has not stepped" in client.get("/health").json()["reason"]
        wait_until(lambda: "the engine stalled: " in server.said(), 5, "a log line")
        server.process.kill()
        thread.join()


def test_server_killed_during_its_start_leaves_no_process(tmp_path: Path) -> None:
    with running(tmp_path, engine={"start_seconds": 300}, num_workers=2, waits=False) as server:
        process = psutil.Process(server.process.pid)
        wait_until(lambda: len(process.children()) == 2, 30, "all processes started")
        children = [child.pid for child in process.children()]
        server.process.kill()
        server.process.wait()
        wait_until(lambda: not any(map(is_alive, children)), 60, "all ended")
        assert server.complaints() == ""


def in_background_to(server: Running, prompt: list[int]) -> tuple[threading.Thread, list[int]]:
    """Send a prompt that may never be answered."""
    done: list[int] = []

    def post() -> None:
        try:
            with server.client() as client:
                done.append(client.post("/v1/completions", json={"prompt": prompt}).status_code)
        except httpx.HTTPError:
            done.append(0)

    thread = threading.Thread(target=post)
    thread.start()
    server.wait_for("submit")
    return thread, done


def num_submitted(server: Running) -> int:
    """Return the number of requests that the engine got."""
    return sum(note.startswith("submit") for note in server.notes())


async def leave(server: Running, path: str, body: dict[str, Any]) -> None:
    """Close the connection of a request that the engine has."""
    async with server.async_client() as client:
        expected = num_submitted(server) + 1
        request = asyncio.create_task(client.post(path, json=body))
        await asyncio.to_thread(
            wait_until, lambda: num_submitted(server) == expected, 60, "submitted"
        )
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request


def test_disconnect_aborts_the_request(tmp_path: Path) -> None:
    prompts = {
        "/v1/completions": {"prompt": "hi"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    }
    with running(tmp_path, engine=SLOW) as server:
        for (path, prompt), streams in product(prompts.items(), (False, True)):
            body = {"max_tokens": 400, "stream": streams, "n": 2, **prompt}
            asyncio.run(leave(server, path, body))
        for sequence in range(1, 9):
            server.wait_for(f"abort {sequence}", 60)
        # The server is idle now, and logs its stop.
        server.process.send_signal(signal.SIGINT)
        assert ended(server) == 0
        assert "stopping" in server.said()


def test_many_disconnects_leave_no_sequence(tmp_path: Path) -> None:
    rng = random.Random(0)

    async def ask(client: httpx.AsyncClient, number: int, seconds: float) -> bool:
        is_chat = number % 2
        body: dict[str, Any] = {"max_tokens": 400, "stream": number % 3 > 0, "n": 1 + number % 3}
        body |= (
            {"messages": [{"role": "user", "content": "hi"}]} if is_chat else {"prompt": "hello"}
        )
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        await asyncio.sleep(rng.random() * seconds)
        try:
            async with asyncio.timeout(rng.random() * seconds):
                await client.post(path, json=body)
        except TimeoutError:
            return True
        return False

    async def ask_all(server: Running, seconds: float) -> list[bool]:
        async with server.async_client() as client:
            return await asyncio.gather(*[ask(client, number, seconds) for number in range(80)])

    # A sequence that is not aborted would run for 400 s.
    with running(tmp_path, engine={"step_seconds": 1.0}) as server:
        seconds = 0.3
        while num_submitted(server) <= 20:  # a slow machine gets few before their clients leave
            assert sum(asyncio.run(ask_all(server, seconds))) > 70
            seconds *= 2
        server.process.terminate()
        assert ended(server, 60) == 0


def test_port_in_use_names_its_owner() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            CapacityError,
            match=rf"{port}.*pid {os.getpid()}.*--port",
        ):
            listen("127.0.0.1", port)


def test_unknown_host_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="--host"):
        listen("no such host", 1)


def test_connections_send_without_delay() -> None:
    (bound,) = listen("127.0.0.1", 0)
    with bound, socket.create_connection(bound.getsockname()), bound.accept()[0] as accepted:
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_drain_waits_for_slow_readers_only_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lifecycle, "UNREAD_SECONDS", 0.2)

    class Engine:
        num_live = 1

    async def drain() -> None:
        engine: Any = Engine()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(lifecycle._only_unread(engine), 1)
        engine.num_live = 0
        await asyncio.wait_for(lifecycle._only_unread(engine), 60)

    asyncio.run(drain())
