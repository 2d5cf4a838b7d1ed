"""Imports the plugins of a distribution in a process of its own, and tells what happened.

A plugin may raise, print, hang or end the process when it is imported; none of that reaches who asks.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import distributions
from typing import Any

from tokenspeed_core.api import KernelSpec, OpContract
from tokenspeed_core.commands import Catalog, Entry, Selection, Status
from tokenspeed_plugin_tools.installed import read

HEAVY = ("torch", "triton", "transformers", "jax", "tensorflow")  # what a descriptor has no need of
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    "from tokenspeed_plugin_tools.probe import answer; answer(sys.argv[2])"
)
_MARK = "\0tokenspeed-probe "


@dataclass(frozen=True, slots=True)
class Need:
    """A module that a kernel needs, whether it is installed, and the line that installs it ("" for unknown)."""

    module: str
    is_installed: bool
    obtain: str


@dataclass(frozen=True, slots=True)
class Probed:
    """What importing one entry's descriptor did. `error` is empty where it worked; `seconds` is its import alone.

    `heavy` are the libraries it imported that a descriptor should not; `dangling` its targets that do not exist.
    `contracts` are the ops that it brings, `computes` the names of those that its kernels compute.
    """

    kind: str
    name: str
    error: str
    seconds: float
    heavy: tuple[str, ...] = ()
    needs: tuple[Need, ...] = ()
    dangling: tuple[str, ...] = ()
    computes: tuple[str, ...] = ()
    contracts: tuple[dict[str, Any], ...] = ()


def probe(entries: Sequence[Entry], timeout: float = 60.0) -> Mapping[Entry, Probed]:
    """Import the usable ones of these entries, a process for each distribution."""
    usable = [entry for entry in entries if entry.status is Status.OK]
    names = sorted({entry.distribution for entry in usable})
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        answers = dict(zip(names, pool.map(lambda name: _ask(name, timeout), names), strict=True))
    found = {}
    for entry in usable:
        told = answers[entry.distribution]
        lost = Probed(entry.kind, entry.name, told if isinstance(told, str) else "the import said nothing", 0.0)
        found[entry] = lost if isinstance(told, str) else told.get((entry.kind, entry.name), lost)
    return found


def _ask(distribution: str, timeout: float) -> dict[tuple[str, str], Probed] | str:
    """Return what the process told, or how it ended without."""
    command = [sys.executable, "-c", _CODE, json.dumps(sys.path), distribution]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout,
                              check=False, errors="replace")
    except subprocess.TimeoutExpired:
        return f"its import was not over after {timeout:.0f} s"
    _, mark, text = done.stdout.rpartition(_MARK)
    if not mark:
        last = next(iter(reversed(done.stderr.strip().splitlines())), "it said nothing")
        return f"its import ended the process with status {done.returncode}: {last}"
    return {(each["kind"], each["name"]): _read(each) for each in json.loads(text)}


def _read(record: dict[str, Any]) -> Probed:
    needs = tuple(Need(**need) for need in record.pop("needs"))
    record |= {name: tuple(record[name]) for name in ("heavy", "dangling", "computes", "contracts")}
    return Probed(**record, needs=needs)


def answer(distribution: str) -> None:
    """Import the distribution's usable entries and print what happened; runs in the process of its own."""
    logging.getLogger("tokenspeed.plugins").disabled = True
    found = []
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        readable = [each.distribution for each in read(distributions())[0]]
        for entry in Catalog.discover(Selection(), check=False, distributions=readable).all():
            if entry.distribution == distribution and entry.status in (Status.OK, Status.FAILED):
                alone = replace(entry, status=Status.OK, reason="")  # a clash may be settled where it was asked
                found.append(asdict(_probe(Catalog([alone]), alone)))
    print(_MARK + json.dumps(found), flush=True)


def _probe(catalog: Catalog, entry: Entry) -> Probed:
    before, start = set(sys.modules), time.perf_counter()
    value = catalog.load(entry, object)
    seconds = time.perf_counter() - start
    heavy = tuple(name for name in HEAVY if name in sys.modules and name not in before)
    (after,) = catalog.all()
    parts = value if isinstance(value, tuple) else (value,)
    needs = {
        module: Need(module, _exists(module), str(getattr(part, "obtain", "")))
        for part in parts for module in getattr(part, "requires", ()) if isinstance(module, str)
    }
    dangling = () if any(not need.is_installed for need in needs.values()) else tuple(_dangling(parts))
    return Probed(
        entry.kind, entry.name, after.reason, seconds, heavy, tuple(needs.values()), dangling,
        computes=tuple(dict.fromkeys(part.op for part in parts if isinstance(part, KernelSpec))),
        contracts=tuple(contract_record(part) for part in parts if isinstance(part, OpContract)),
    )


def contract_record(contract: OpContract) -> dict[str, Any]:
    """Return what an author of a backend reads of an op, for JSON, whatever a plugin wrote there."""
    words = ("name", "family", "signature", "errors", "reference", "inputs")
    return {
        **{word: str(getattr(contract, word)) for word in words},
        "axes": {str(axis): str(meaning) for axis, meaning in contract.axes.items()},
        **{word: [str(each) for each in getattr(contract, word)] for word in ("mutates", "rows", "parts")},
        "tolerances": [
            {
                "dtype": str(each.dtype), "relative": float(each.relative), "absolute": float(each.absolute),
                "source": str(each.source),
            }
            for each in contract.tolerances
        ],
    }


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _dangling(parts: Sequence[Any]) -> Iterator[str]:
    """Yield the "module:attribute" targets whose module is not there; their packages are imported for it."""
    for part in parts:
        target = getattr(part, "load", None)
        if isinstance(target, str) and ":" in target:
            try:
                missing = not _exists(target.partition(":")[0])
            except Exception:  # the package of the target raises; loading it will say so
                continue
            if missing:
                yield target
