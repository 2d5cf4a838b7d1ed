"""`tokenspeed plugins check DIST`: the conformance kit over an installed distribution, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from tokenspeed_core.commands import Catalog
from tokenspeed_plugin_tools.lock import enforce_environment
from tokenspeed_plugin_tools.named import entries_of

_SIGNS = {"ok": "ok", "failed": "FAILED", "skipped": "-", "running": "DIED"}


def check(
    distribution: Annotated[str, typer.Argument(metavar="DIST", help="an installed distribution")],
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
) -> int:
    """Print a verdict per line; return 1 where anything failed, or where the process died.

    A kernel that ends the process is a verdict as well: the question it died in.
    """
    enforce_environment()
    distribution = entries_of(Catalog.discover(check=False).all(), distribution, "check")[0].distribution
    verdicts = []
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "tokenspeed_core.testing", distribution],
            stdout=subprocess.PIPE, stderr=errors, text=True,
        )
        for verdict in _read(child):
            verdicts.append(verdict)
            if not as_json:
                typer.echo(line(verdict))
        child.wait()
        errors.seek(0)
        stderr = errors.read()
    passed = child.returncode == 0 and bool(verdicts) and all(v["verdict"] in ("ok", "skipped") for v in verdicts)
    counts = {word: sum(v["verdict"] == word for v in verdicts) for word in ("ok", "failed", "skipped")}
    if as_json:
        summary = {"distribution": distribution, "passed": passed, "status": child.returncode, "verdicts": verdicts}
        typer.echo(json.dumps(summary, indent=2))
        return 0 if passed else 1
    if child.returncode:
        typer.echo(f"the process ended with {child.returncode}: {(stderr.strip().splitlines() or ['no word'])[-1]}")
    total = ", ".join(f"{num} {word}" for word, num in counts.items())
    typer.echo(f"{distribution}: {'passed' if passed else 'FAILED'}, {total}")
    return 0 if passed else 1


def line(verdict: dict[str, Any]) -> str:
    """Return a verdict for people: the sign, what was asked of what, and under it why."""
    seconds = f" ({verdict['seconds']:.1f} s)" if verdict["seconds"] >= 0.1 else ""
    first = f"{_SIGNS[verdict['verdict']]:<7} {verdict['subject']}: {verdict['question']}{seconds}"
    lines = verdict["detail"].strip().splitlines()
    shown = lines if len(lines) < 12 else [*lines[:4], "…", *lines[-6:]]
    return "\n".join([first, *(f"          {each}" for each in shown)])


def _read(child: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """Yield the final verdict of each question; the one under way where the process died."""
    assert child.stdout is not None
    running: dict[str, Any] | None = None
    for text in child.stdout:
        if not text.startswith('{"subject"'):
            continue  # what a plugin prints itself
        verdict = json.loads(text)
        if verdict["verdict"] == "running":
            running = verdict
        else:
            running = None
            yield verdict
    if running is not None:
        yield {**running, "detail": "the process died in this question"}
