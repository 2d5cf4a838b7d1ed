"""`--restart-engine` with several engines: one that died starts again, and the server goes on."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from serving import DEMO, served, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.release]
SETTINGS = ("--data-parallel-size", "2", "--restart-engine", "--kv-cache-memory", "8MB")


def engines_of(pid: int) -> set[psutil.Process]:
    children = psutil.Process(pid).children()
    return {each for each in children if "tokenspeed_core.engine.process" in each.cmdline()}


def test_engine_that_died_answers_again(tmp_path: Path) -> None:
    request = {**DEMO, "prompt": "What is 23 + 45?", "max_tokens": 8}
    with served(tmp_path, *SETTINGS) as server:
        client = server.openai()
        expected = client.completions.create(**request).choices[0].text
        before = engines_of(server.process.pid)
        victim, survivor = before
        victim.kill()
        wait_until(lambda: "it restarts" in server.stderr(), 60, "noticed")
        assert client.completions.create(**request).choices[0].text == expected
        wait_until(lambda: "is ready again" in server.stderr(), 120, "ready again")
        assert len(engines_of(server.process.pid) - before) == 1
        survivor.kill()  # now only the new engine can answer
        wait_until(lambda: server.stderr().count("it restarts") == 2, 60, "noticed")
        assert client.completions.create(**request).choices[0].text == expected
        wait_until(lambda: server.stderr().count("is ready again") == 2, 120, "ready again")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert not server.sockets()
