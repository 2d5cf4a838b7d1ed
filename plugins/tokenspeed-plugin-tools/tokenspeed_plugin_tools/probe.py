"""Imports plugins in another process and reports the results.

A plugin may raise, print, hang or end the process when it is imported.
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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from tokenspeed_testing.loading import kernel_failures, try_load

from tokenspeed_core.api import KernelSpec, OpContract
from tokenspeed_core.commands import Catalog, Entry, Selection, Status

HEAVY = ("torch", "triton", "transformers", "jax", "tensorflow")
_MARK = "tokenspeed-probe "
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    "from tokenspeed_plugin_tools.probe import main; main(sys.argv[2])"
)


@dataclass(frozen=True, slots=True)
class Need:
    """A module that a kernel requires; `obtain` is the command that installs it, "" if unknown."""

    module: str
    is_installed: bool
    obtain: str


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of importing one entry.

    `error` is "" if a start would use the entry. `seconds` is the time to import the descriptor, `heavy`
    the libraries imported with it that a descriptor should not import. `computes` are the ops of its
    kernels, `contracts` the ops that it adds.
    """

    error: str = ""
    seconds: float = 0.0
    heavy: tuple[str, ...] = ()
    needs: tuple[Need, ...] = ()
    computes: tuple[str, ...] = ()
    contracts: tuple[dict[str, Any], ...] = ()


def probe(
    entries: Sequence[Entry], timeout: float = 60.0, *, with_kernels: bool = True
) -> Mapping[Entry, Probe]:
    """Import the usable entries, in one process for each distribution. `timeout` is in seconds.

    With `with_kernels`, also import the kernels that can run on this machine.
    """
    by_distribution: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.status is Status.OK:
            by_distribution.setdefault(entry.distribution, []).append(entry)
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        results = pool.map(
            lambda group: _probe_group(group, timeout, with_kernels), by_distribution.values()
        )
        return {entry: found for result in results for entry, found in result.items()}


def _probe_group(
    entries: Sequence[Entry], timeout: float, with_kernels: bool
) -> dict[Entry, Probe]:
    """Import the entries of one distribution in a process."""
    names = [(entry.distribution, entry.kind, entry.name) for entry in entries]
    question = json.dumps({"names": names, "with_kernels": with_kernels})
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CODE, json.dumps(sys.path), question],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
        output, errors = done.stdout, done.stderr
        end = f"ended the process with status {done.returncode}"
    except subprocess.TimeoutExpired as expired:
        output, errors = _text(expired.stdout), _text(expired.stderr)
        end = f"did not finish within {timeout:.0f} s"
    if last := errors.strip().splitlines()[-1:]:
        end += f": {last[0]}"
    found: dict[Entry, Probe] = {}
    current = entries[0]
    for line in output.splitlines():
        if line.startswith(_MARK):
            record = json.loads(line.removeprefix(_MARK))
            current = entries[record.pop("index")]
            if record:
                found[current] = _read(record)
    for entry in entries:
        if entry not in found:
            what = "its import" if entry is current else f"importing {current.kind} {current.name}"
            found[entry] = Probe(error=f"{what} {end}")
    return found


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _read(record: dict[str, Any]) -> Probe:
    return Probe(
        error=record["error"],
        seconds=record["seconds"],
        heavy=tuple(record["heavy"]),
        needs=tuple(Need(**need) for need in record["needs"]),
        computes=tuple(record["computes"]),
        contracts=tuple(record["contracts"]),
    )


def main(question: str) -> None:
    """Import entries and print a record for each. Runs in the other process."""
    logging.disable()
    asked = json.loads(question)
    entries = Catalog.discover(Selection(), check=False).all()
    by_name = {(entry.distribution, entry.kind, entry.name): entry for entry in entries}
    # The plugin selection of the calling process may resolve a name conflict.
    mine = [replace(by_name[tuple(name)], status=Status.OK, reason="") for name in asked["names"]]
    stdout = sys.stdout

    def report(index: int, **record: Any) -> None:
        print(f"\n{_MARK}{json.dumps({'index': index, **record})}", file=stdout, flush=True)

    with contextlib.redirect_stdout(io.StringIO()):
        # Import all descriptors before any kernel, so that the time of each is its own.
        found = []
        for index, entry in enumerate(mine):
            report(index)
            found.append(_import(entry))
        for index, (entry, imported) in enumerate(zip(mine, found, strict=True)):
            report(index)
            error = imported.error or _use(entry, entries, with_kernels=asked["with_kernels"])
            report(index, **asdict(replace(imported, error=error)))


def _import(entry: Entry) -> Probe:
    """Import the descriptor of an entry."""
    catalog = Catalog([entry])
    before = set(sys.modules)
    start = time.perf_counter()
    value = catalog.load(entry, object)
    seconds = time.perf_counter() - start
    heavy = tuple(name for name in HEAVY if name in sys.modules and name not in before)
    parts = value if isinstance(value, tuple) else (value,)
    needs = {
        module: Need(module, _exists(module), str(getattr(part, "obtain", "")))
        for part in parts
        for module in getattr(part, "requires", ())
        if isinstance(module, str)
    }
    return Probe(
        catalog.all()[0].reason,
        seconds,
        heavy,
        tuple(needs.values()),
        tuple(dict.fromkeys(part.op for part in parts if isinstance(part, KernelSpec))),
        tuple(contract_record(part) for part in parts if isinstance(part, OpContract)),
    )


def _use(entry: Entry, entries: Sequence[Entry], *, with_kernels: bool) -> str:
    """Return why a start would not use an entry, "" if it would."""
    reason = try_load(entry, entries).reason
    if not reason and with_kernels and entry.kind.startswith("kernels."):
        reason = "; ".join(dict.fromkeys(kernel_failures(entry, entries)))
    return reason


def contract_record(contract: OpContract) -> dict[str, Any]:
    """Return an op's contract for JSON."""
    words = ("name", "family", "signature", "errors", "reference", "inputs")
    lists = ("mutates", "rows", "parts")
    return {
        **{word: str(getattr(contract, word)) for word in words},
        "axes": {str(axis): str(meaning) for axis, meaning in contract.axes.items()},
        **{word: [str(each) for each in getattr(contract, word)] for word in lists},
        "tolerances": [
            {
                "dtype": str(each.dtype),
                "relative": float(each.relative),
                "absolute": float(each.absolute),
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
