"""Reading and writing result files. Files are checked early and written atomically."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenspeed_bench.errors import BenchError
from tokenspeed_bench.result import SCHEMA


def check_writable(*paths: str | None) -> None:
    """Check before a measurement that its files can be written. Raises BenchError."""
    for path in paths:
        if path is None or path == "-":
            continue
        target = _target(path)
        if not target.parent.is_dir():
            raise BenchError(
                f"{path}: the directory {target.parent} does not exist. Create it or choose another file."
            )
        wanted = ([target] if target.exists() else []) + (
            [] if _is_special(target) else [target.parent]
        )
        if target.is_dir() or not all(os.access(each, os.W_OK) for each in wanted):
            raise BenchError(f"{path}: not writable. Choose another file.")


def write(path: str, text: str) -> None:
    """Write a file atomically; on failure the old content stays. Raises BenchError."""
    target = _target(path)
    part = target if _is_special(target) else target.with_name(f".{target.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        if part is not target:
            if target.exists():
                shutil.copymode(target, part)
            part.replace(target)
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from error
    finally:
        if part is not target:
            part.unlink(missing_ok=True)


def write_result(result: Mapping[str, Any], path: str) -> None:
    """Write a result as JSON; "-" is stdout. Raises BenchError."""
    text = json.dumps(result, ensure_ascii=False) + "\n"
    if path != "-":
        write(path, text)
        return
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise BenchError(f"the standard output: {error.strerror}") from error


def read(path: str) -> dict[str, Any]:
    """Read a result. Raises BenchError if the file is not a result of this schema."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise BenchError(f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict) or "schema" not in data or not {"runs", "results"} & data.keys():
        raise BenchError(
            f"{path}: not a result of `tokenspeed bench`. Write one with `tokenspeed bench ... --json FILE`."
        )
    if data["schema"] != SCHEMA:
        raise BenchError(
            f"{path}: has schema {data['schema']}, but this version reads {SCHEMA}. Measure again."
        )
    for flaw in _flaws(data):
        raise BenchError(f"{path}: malformed result: {flaw}. Measure again.")
    return data


def _flaws(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield each missing or malformed part of a result."""
    parts = data.get("results", [data])
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        yield "results is not a list of results"
        return
    for part in parts:
        if not isinstance(part.get("kind"), str) or not isinstance(part.get("runs"), list):
            yield "kind or runs is missing"
            return
        for i, run in enumerate(part["runs"]):
            if not _is_run(run):
                yield f"runs[{i}] lacks a traffic name or numeric figures"
    if not isinstance(data.get("versions", {}), dict):
        yield "versions is not a mapping"


def _is_run(run: object) -> bool:
    if not isinstance(run, dict):
        return False
    traffic, figures = run.get("traffic"), run.get("figures")
    return (
        isinstance(traffic, dict)
        and isinstance(traffic.get("name"), str)
        and isinstance(figures, dict)
        and all(isinstance(value, int | float) for value in figures.values())
        and all(isinstance(run.get(name) or {}, dict) for name in ("pace", "goals"))
    )


def _target(path: str) -> Path:
    return Path(os.path.realpath(path))  # a link is kept, and its target is replaced


def _is_special(target: Path) -> bool:
    """Return whether the path is something other than a file, such as a pipe, which is never replaced."""
    return target.exists() and not target.is_file()
