"""Counts the calls of each client library by outcome."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import pytest

Outcome = Literal["passed", "refused", "failed"]
OUTCOMES: tuple[Outcome, ...] = ("passed", "refused", "failed")


@dataclass(frozen=True)
class Call:
    """The outcome of one test."""

    client: str
    version: str
    name: str
    outcome: Outcome
    reason: str  # why the server refuses the call by design


class CallTable:
    """A plugin of pytest: each test of a module with a constant `CLIENT` is a call of that distribution."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        """Note the outcome of a test, unless it is skipped or expected to fail."""
        done = yield
        report = done.get_result()  # type: ignore[attr-defined]
        if report.when != "call" and not (report.when == "setup" and report.failed):
            return
        mark = item.get_closest_marker("refused")
        if report.skipped:
            return
        client, client_version = self._client(item)
        outcome: Outcome = "passed"
        if report.failed:
            outcome = "failed"
        elif mark is not None:
            outcome = "refused"
        reason = "" if mark is None else mark.args[0]
        self.calls.append(Call(client, client_version, item.name, outcome, reason))

    def _client(self, item: pytest.Item) -> tuple[str, str]:
        module = item.getparent(pytest.Module).obj  # type: ignore[union-attr]
        client = module.CLIENT
        known = getattr(module, "VERSION", None)
        return client, known or version(client)

    def text(self) -> str:
        """Return the table as text."""
        lines = [f"{'client':<32}{'passed':>8}{'refused':>9}{'failed':>8}"]
        for client in dict.fromkeys((call.client, call.version) for call in self.calls):
            counts = [
                sum(
                    (call.client, call.version, call.outcome) == (*client, outcome)
                    for call in self.calls
                )
                for outcome in OUTCOMES
            ]
            name = " ".join(client)
            lines.append(f"{name:<32}{counts[0]:>8}{counts[1]:>9}{counts[2]:>8}")
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        """Write the calls as JSON."""
        path.write_text(json.dumps([asdict(call) for call in self.calls], indent=1))
