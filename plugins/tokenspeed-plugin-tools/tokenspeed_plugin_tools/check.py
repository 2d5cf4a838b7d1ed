"""`tokenspeed plugins check`: run the conformance kit on an installed distribution, in another process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from tokenspeed_core.commands import Catalog
from tokenspeed_plugin_tools.errors import ToolsError
from tokenspeed_plugin_tools.installed import entries_of, with_unreadable
from tokenspeed_plugin_tools.lock import enforce_environment

_SIGNS = {"ok": "ok", "failed": "FAILED", "skipped": "-", "running": "DIED"}


def check(
    distribution: Annotated[str, typer.Argument(metavar="DIST", help="An installed distribution.")],
    against: Annotated[
        str | None,
        typer.Option(
            metavar="LIBRARY", help="Compare model families with a library: transformers."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Print one result per line; return 1 if a test failed or the process died.

    Cases that need another machine are counted in the last line and do not count as failures; in JSON,
    `is_complete` is then false.
    """
    enforce_environment()
    first, *_ = entries_of(
        with_unreadable(Catalog.discover(check=False).all()), distribution, "check"
    )
    if first.kind == "unknown":
        raise ToolsError(f"check {distribution}: {first.reason}")
    distribution = first.distribution
    arguments = [distribution] if against is None else [distribution, _library(against)]
    verdicts = []
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "tokenspeed_testing", *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        for verdict in _read(child):
            verdicts.append(verdict)
            if not as_json:
                typer.echo(line(verdict))
        child.wait()
        errors.seek(0)
        stderr = errors.read()
    report = summary(distribution, child.returncode, verdicts)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return 0 if report["passed"] else 1
    if child.returncode:
        typer.echo(
            f"the process ended with status {child.returncode}: {(stderr.strip().splitlines() or ['no output'])[-1]}"
        )
    typer.echo(last_line(report))
    return 0 if report["passed"] else 1


def _library(name: str) -> str:
    """Return the name of an installed library that families can be compared with. Raises ToolsError."""
    if name != "transformers":
        raise ToolsError(f"--against {name}: unknown library; choose transformers")
    if find_spec(name) is None:
        raise ToolsError(f"--against {name}: {name} is not installed; run `pip install {name}`")
    return name


def summary(distribution: str, status: int, verdicts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the report on a distribution. `is_complete` is false if cases could not run here."""
    not_run = [
        {"subject": each["subject"], "num_cells": each["num_cases_not_run"], "needs": each["needs"]}
        for each in verdicts
        if each["needs"]
    ]
    passed = (
        status == 0
        and bool(verdicts)
        and all(each["verdict"] in ("ok", "skipped") for each in verdicts)
    )
    return {
        "distribution": distribution,
        "passed": passed,
        "is_complete": passed and not not_run,
        "not_run": not_run,
        "status": status,
        "verdicts": list(verdicts),
    }


def last_line(report: dict[str, Any]) -> str:
    """Return the overall result, with the number of cases that need another machine."""
    left: dict[str, int] = {}
    for each in report["not_run"]:
        left[each["needs"]] = left.get(each["needs"], 0) + each["num_cells"]
    counts = (
        f"{sum(each['verdict'] == word for each in report['verdicts'])} {word}"
        for word in ("ok", "failed", "skipped")
    )
    parts = [
        f"{report['distribution']}: {'passed' if report['passed'] else 'FAILED'}",
        *(f"{num} cases need {needs}" for needs, num in left.items()),
    ]
    return f"{', '.join(parts)} ({', '.join(counts)})"


def line(verdict: dict[str, Any]) -> str:
    """Return a result as text, with details on the following lines."""
    seconds = f" ({verdict['seconds']:.1f} s)" if verdict["seconds"] >= 0.1 else ""
    first = f"{_SIGNS[verdict['verdict']]:<7} {verdict['subject']}: {verdict['question']}{seconds}"
    lines = verdict["detail"].strip().splitlines()
    shown = lines if len(lines) < 12 else [*lines[:4], "…", *lines[-6:]]
    return "\n".join([first, *(f"          {each}" for each in shown)])


def _read(child: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """Yield the result of each test; if the process died, the test that was running comes last."""
    assert child.stdout is not None
    running: dict[str, Any] | None = None
    for text in child.stdout:
        if not text.startswith('{"subject"'):
            continue  # output of the plugin
        verdict = json.loads(text)
        if verdict["verdict"] == "running":
            running = verdict
        else:
            running = None
            yield verdict
    if running is not None:
        yield {**running, "detail": "the process died in this test"}
