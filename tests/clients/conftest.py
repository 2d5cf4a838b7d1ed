"""A running server for the clients, and the table of their calls."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from call_table import CallTable
from running_server import Server, run

TABLE = pytest.StashKey[CallTable]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--table", type=Path, help="JSON file that gets the outcome of every call")


def pytest_configure(config: pytest.Config) -> None:
    table = CallTable()
    config.stash[TABLE] = table
    config.pluginmanager.register(table)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    table = config.stash[TABLE]
    terminalreporter.section("calls by client")
    terminalreporter.write_line(table.text())
    path = config.getoption("--table")
    if path is not None:
        table.write(path)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield the server at SERVER_URL with the key SERVER_KEY, or one that is started with the demo."""
    url = os.environ.get("SERVER_URL")
    if url is not None:
        yield Server(url.rstrip("/"), os.environ.get("SERVER_KEY", "any"))
        return
    with run(tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no client send telemetry, use a proxy, or take settings of the developer."""
    for name in os.environ:
        if name.startswith(("OPENAI_", "ANTHROPIC_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
