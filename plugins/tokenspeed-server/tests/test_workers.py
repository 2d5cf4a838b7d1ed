"""Several API workers on one address: they start together, answer alike, and end together."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from server_support import Running, is_alive, running, wait_until

from tokenspeed_core.engine.messages import WORKER_SHIFT

pytestmark = pytest.mark.slow

SLOW = {"step_seconds": 0.03}
ENDLESS: dict[str, Any] = {"prompt": [70, 71], "max_tokens": 400, "stream": True}


@contextmanager
def connections(server: Running, count: int) -> Iterator[list[httpx.Client]]:
    """Open connections and keep them open. The system spreads them over the workers at random."""
    clients = [server.client() for _ in range(count)]
    try:
        for client in clients:
            assert client.get("/ready").status_code == 200
        yield clients
    finally:
        for client in clients:
            client.close()


def owners(server: Running) -> Counter[int]:
    """Return how many requests each worker sent to the engine."""
    ids = [int(note.split()[1]) for note in server.notes() if note.startswith("submit")]
    assert len(set(ids)) == len(ids), "two workers chose the same id"
    return Counter(each >> WORKER_SHIFT for each in ids)


def workers(server: Running) -> list[psutil.Process]:
    """Return the processes of the secondary workers, by number."""
    children = psutil.Process(server.process.pid).children()
    others = (
        child
        for child in children
        if any(part.endswith("server_support.py") for part in child.cmdline())
    )
    return sorted(others, key=lambda child: child.pid)


def all_ended(server: Running, others: list[psutil.Process], seconds: float = 60.0) -> int:
    """Wait for the end of every process of a server; return its status."""
    status = server.process.wait(seconds)
    wait_until(
        lambda: not any(map(is_alive, [server.engine_pid(), *(each.pid for each in others)])),
        60,
        "all ended",
    )
    assert not list(server.log.parent.glob("*tokenspeed-*")), "a socket's folder was left behind"
    return status


def ask_from_all(
    clients: list[httpx.Client], body: dict[str, Any]
) -> list[httpx.Response | httpx.HTTPError]:
    """Send a request on every connection at once; return the answers or errors, in that order."""
    answers: dict[int, httpx.Response | httpx.HTTPError] = {}

    def post(number: int) -> None:
        try:
            answers[number] = clients[number].post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            answers[number] = error

    threads = [threading.Thread(target=post, args=(number,)) for number in range(len(clients))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[number] for number in range(len(clients))]


def in_background(
    server: Running, clients: list[httpx.Client], body: dict[str, Any]
) -> tuple[threading.Thread, list[Any]]:
    """Do the same in a thread, which fills the list. Return when the engine has all requests."""
    answers: list[Any] = []
    expected = owners(server).total() + len(clients)
    thread = threading.Thread(target=lambda: answers.extend(ask_from_all(clients, body)))
    thread.start()
    wait_until(lambda: owners(server).total() == expected, 60, "all at work")
    return thread, answers


def wait_for_drain(server: Running) -> None:
    wait_until(lambda: "draining" in server.said(), 60, "draining")


def connection_to(worker: int, server: Running, clients: list[httpx.Client]) -> httpx.Client:
    """Return the first connection to this worker."""
    for client in clients:
        before = owners(server)
        assert (
            client.post("/v1/completions", json={"prompt": [70], "max_tokens": 1}).status_code
            == 200
        )
        if owners(server)[worker] > before[worker]:
            return client
    raise AssertionError(f"no connection of {len(clients)} is to worker {worker}")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with two workers and a store of responses."""
    folder = tmp_path_factory.mktemp("pair")
    with running(
        folder, options={"response_store": str(folder / "responses")}, num_workers=2
    ) as server:
        yield server


def test_workers_answer_as_one_worker_does(pair: Running, tmp_path: Path) -> None:
    body = {"prompt": "hello world, how are you", "max_tokens": 30, "temperature": 0, "logprobs": 2}
    with running(tmp_path) as alone, alone.client() as client:
        expected = client.post("/v1/completions", json=body).json()["choices"]
    with connections(pair, 24) as clients:
        answers = ask_from_all(clients, body)
        assert all(
            isinstance(each, httpx.Response) and each.json()["choices"] == expected
            for each in answers
        )
        assert set(owners(pair)) == {0, 1}
        assert max(owners(pair).values()) <= 22, "one worker got nearly all requests"
        bodies = {
            client.get(path).text
            for client in clients
            for path in ("/v1/plugins", "/v1/models", "/ready")
        }
        assert len(bodies) == 3, "workers describe the server differently"


def test_every_worker_finds_a_stored_response(pair: Running) -> None:
    with connections(pair, 12) as clients:
        body = {"input": "hello", "max_output_tokens": 3}
        stored = clients[0].post("/v1/responses", json=body).json()
        assert stored["status"] == "incomplete"
        assert all(
            client.get(f"/v1/responses/{stored['id']}").json() == stored for client in clients
        )


def test_workers_serve_when_all_are_ready(tmp_path: Path) -> None:
    with running(
        tmp_path, engine={"starts_after": str(tmp_path / "go")}, num_workers=2, waits=False
    ) as server:
        assert not any(server.is_ready() for _ in range(12))
        (tmp_path / "go").touch()
        wait_until(lambda: all(server.is_ready() for _ in range(20)), 60, "all workers serve")
        assert {note for note in server.notes() if note.startswith("hello")} == {
            "hello 0",
            "hello 1",
        }


def test_disconnect_from_any_worker_aborts(tmp_path: Path) -> None:
    def leave(client: httpx.Client, seconds: int) -> None:
        with pytest.raises(httpx.ReadTimeout):
            client.post(
                "/v1/completions",
                json=ENDLESS | {"stream": False},
                timeout=httpx.Timeout(60, read=seconds),
            )

    with (
        running(tmp_path, engine={"step_seconds": 0.3}, num_workers=2) as server,
        connections(server, 24) as clients,
    ):
        for seconds in (1, 4, 16):  # a slow machine may take more than one to read a request
            with ThreadPoolExecutor(24) as pool:
                list(pool.map(leave, clients, [seconds] * 24))
            if set(owners(server)) == {0, 1}:
                break
        assert set(owners(server)) == {0, 1}
        ids = [note.split()[1] for note in server.notes() if note.startswith("submit")]
        for each in ids:
            server.wait_for(f"abort {each}", 60)


def test_killed_worker_ends_the_server_after_a_drain(
    tmp_path: Path,
) -> None:
    held = tmp_path / "held"
    held.touch()
    with (
        running(tmp_path, engine={"held_by": str(held)}, num_workers=2) as server,
        connections(server, 12) as clients,
    ):
        thread, answers = in_background(server, clients, ENDLESS | {"max_tokens": 60})
        (other,) = others = workers(server)
        other.kill()
        wait_until(
            lambda: "API worker 1 of 2 was killed by SIGKILL" in server.said(),
            60,
            "the death to be logged",
        )
        assert thread.is_alive()
        held.unlink()
        thread.join(60)
        answered = [each.text for each in answers if isinstance(each, httpx.Response)]
        whole = [text for text in answered if '"finish_reason":"length"' in text]
        assert len(whole) == owners(server)[0], "a request of the other worker was lost"
        assert all_ended(server, others) == 1
        assert "API worker 1 of 2 was killed by SIGKILL" in server.complaints()


@pytest.mark.release
def test_requests_of_a_killed_worker_do_not_delay_the_end(tmp_path: Path) -> None:
    with (
        running(tmp_path, engine={"step_seconds": 0.5}, num_workers=2) as server,
        connections(server, 12) as clients,
    ):
        others = workers(server)
        thread, _ = in_background(server, clients, ENDLESS)
        others[0].kill()
        for client in clients:
            client.close()
        assert all_ended(server, others) == 1
        thread.join(60)


def test_worker_that_cannot_start_ends_the_server(tmp_path: Path) -> None:
    with running(tmp_path, engine={"start_seconds": 300}, num_workers=2, waits=False) as server:
        wait_until(
            lambda: len(workers(server)) == 1 if server.log.exists() else False,
            30,
            "the worker's process",
        )
        others = workers(server)
        others[0].kill()
        assert all_ended(server, others) == 1
        assert "API worker 1 of 2 was killed by SIGKILL" in server.complaints()


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.release)]
)
def test_signal_drains_all_workers(tmp_path: Path, number: signal.Signals) -> None:
    with (
        running(tmp_path, engine=SLOW, num_workers=2) as server,
        connections(server, 12) as clients,
    ):
        others = workers(server)
        thread, answers = in_background(server, clients, ENDLESS | {"max_tokens": 40})
        assert set(owners(server)) == {0, 1}
        server.process.send_signal(number)
        assert all_ended(server, others) == 0
        thread.join()
        assert all('"finish_reason":"length"' in each.text for each in answers)
        assert "drained" in server.notes()
        assert server.said().count("draining") == 1


@pytest.mark.release
@pytest.mark.parametrize("worker", [0, 1])
def test_drain_is_announced_whichever_worker_is_busy(tmp_path: Path, worker: int) -> None:
    held = tmp_path / "held"
    with (
        running(tmp_path, engine={"held_by": str(held)}, num_workers=2) as server,
        connections(server, 12) as clients,
    ):
        client, others = connection_to(worker, server, clients), workers(server)
        first = connection_to(0, server, clients)
        held.touch()
        thread, answers = in_background(server, [client], ENDLESS | {"max_tokens": 60})
        wait_until(
            lambda: first.get("/v1/stats").json().get("requests", {}).get("running") == 1,
            60,
            "the first worker knows of the engine's work",
        )
        server.process.send_signal(signal.SIGINT)
        wait_for_drain(server)
        held.unlink()
        assert all_ended(server, others) == 0
        thread.join()
        assert '"finish_reason":"length"' in answers[0].text
        assert server.said().count("draining; interrupt again to stop immediately") == 1


@pytest.mark.release
def test_worker_killed_in_a_drain_is_reported(tmp_path: Path) -> None:
    held = tmp_path / "held"
    with (
        running(tmp_path, engine={"held_by": str(held)}, num_workers=2) as server,
        connections(server, 12) as clients,
    ):
        client, others = connection_to(0, server, clients), workers(server)
        lost = connection_to(1, server, clients)
        held.touch()
        thread, answers = in_background(server, [client, lost], ENDLESS | {"max_tokens": 60})
        server.process.send_signal(signal.SIGTERM)
        wait_for_drain(server)
        others[0].kill()
        held.unlink()
        assert all_ended(server, others) == 1
        thread.join()
        assert '"finish_reason":"length"' in answers[0].text
        assert isinstance(answers[1], httpx.HTTPError)
        assert "API worker 1 of 2 was killed by SIGKILL" in server.complaints()


@pytest.mark.release
@pytest.mark.parametrize("worker", [0, 1])
def test_engine_death_in_a_drain_ends_the_server(tmp_path: Path, worker: int) -> None:
    with (
        running(tmp_path, engine=SLOW, num_workers=2) as server,
        connections(server, 12) as clients,
    ):
        client, others = connection_to(worker, server, clients), workers(server)
        thread, answers = in_background(server, [client], ENDLESS)
        server.process.send_signal(signal.SIGTERM)
        wait_for_drain(server)
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert all_ended(server, others) == 1
        thread.join()
        assert '"code": "engine_dead"' in answers[0].text
        assert "the engine died: its process was killed by SIGKILL" in server.complaints()


@pytest.mark.release
@pytest.mark.parametrize("worker_seconds", [0, 30])
def test_signal_during_the_start_ends_all_processes(tmp_path: Path, worker_seconds: int) -> None:
    slow = {"start_seconds": 300, "worker_seconds": worker_seconds}
    with running(tmp_path, engine=slow, num_workers=3, waits=False) as server:
        wait_until(
            lambda: server.log.exists() and len(workers(server)) == 2, 30, "the workers' processes"
        )
        others = workers(server)
        server.process.send_signal(signal.SIGTERM)
        assert all_ended(server, others) == 0


@pytest.mark.release
def test_sigterm_to_every_process_drains(tmp_path: Path) -> None:
    with (
        running(tmp_path, engine=SLOW, num_workers=2) as server,
        connections(server, 12) as clients,
    ):
        others = workers(server)
        thread, answers = in_background(server, clients, ENDLESS | {"max_tokens": 40})
        for pid in (*(other.pid for other in others), server.process.pid):
            os.kill(pid, signal.SIGTERM)
        assert all_ended(server, others) == 0
        thread.join()
        assert all('"finish_reason":"length"' in each.text for each in answers)


@pytest.mark.release
def test_second_signal_ends_all_workers(tmp_path: Path) -> None:
    with (
        running(tmp_path, engine={"step_seconds": 0.5}, num_workers=2) as server,
        connections(server, 8) as clients,
    ):
        others = workers(server)
        thread, answers = in_background(server, clients, ENDLESS)
        server.process.send_signal(signal.SIGTERM)
        wait_for_drain(server)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert all_ended(server, others) == 128 + signal.SIGTERM
        thread.join()
        assert all('"code": "stopped"' in each.text for each in answers)


def test_every_worker_reports_a_dead_engine(tmp_path: Path) -> None:
    with (
        running(tmp_path, engine=SLOW, num_workers=2) as server,
        connections(server, 12) as clients,
    ):
        others = workers(server)
        thread, answers = in_background(server, clients, ENDLESS)
        os.kill(server.engine_pid(), signal.SIGKILL)
        thread.join(60)
        assert all('"code": "engine_dead"' in each.text for each in answers)
        assert all_ended(server, others) == 1


def test_killed_first_worker_leaves_no_processes(tmp_path: Path) -> None:
    with running(tmp_path, engine=SLOW, num_workers=2) as server:
        others = workers(server)
        assert len(others) == 1
        server.process.kill()
        assert all_ended(server, others) == -signal.SIGKILL
