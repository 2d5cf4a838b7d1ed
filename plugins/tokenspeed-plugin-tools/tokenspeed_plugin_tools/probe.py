"""Imports the plugins of a distribution in a process of its own, and tells what happened and what a start would say.

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
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from importlib.metadata import distributions
from typing import Any

from tokenspeed_testing.loading import judged, kernel_failures

from tokenspeed_core.api import KernelSpec, OpContract
from tokenspeed_core.commands import Catalog, Entry, Selection, Status
from tokenspeed_plugin_tools.installed import read

HEAVY = ("torch", "triton", "transformers", "jax", "tensorflow")  # what a descriptor has no need of
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    "from tokenspeed_plugin_tools.probe import answer; answer(sys.argv[2])"
)
_MARK = "\0tokenspeed-probe "
_OVER: dict[str, Any] = {"over": True}


@dataclass(frozen=True, slots=True)
class Need:
    """A module that a kernel needs, whether it is installed, and the line that installs it ("" for unknown)."""

    module: str
    is_installed: bool
    obtain: str


class Stage(StrEnum):
    """What is asked of an entry, one after the other; and what the entry did that failed in it."""

    IMPORT = "its import"
    START = "what a start asks of it"
    KERNELS = "the import of its kernels"


@dataclass(frozen=True, slots=True)
class Probed:
    """What importing one entry's descriptor did, and what a start then says of it.

    `error` is empty where neither failed, and `failed_in` says which did; `seconds` is the import of the descriptor
    alone. `heavy` are the libraries it imported that a descriptor should not; `dangling` its targets that do not exist.
    `contracts` are the ops that it brings, `computes` the names of those that its kernels compute.
    """

    kind: str
    name: str
    error: str
    seconds: float
    failed_in: Stage = Stage.IMPORT
    heavy: tuple[str, ...] = ()
    needs: tuple[Need, ...] = ()
    dangling: tuple[str, ...] = ()
    computes: tuple[str, ...] = ()
    contracts: tuple[dict[str, Any], ...] = ()


def probe(
    entries: Sequence[Entry], timeout: float = 60.0, *, with_kernels: bool = True
) -> Mapping[Entry, Probed]:
    """Import the usable ones of these entries, a process for each distribution, and ask what a start would.

    `with_kernels`: the kernels that may run here are imported too.
    """
    asked: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.status is Status.OK:
            asked.setdefault(entry.distribution, []).append(entry)
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        answers = pool.map(lambda mine: _ask(mine, timeout, with_kernels), asked.values())
        return {entry: told for answer in answers for entry, told in answer.items()}


def _ask(entries: Sequence[Entry], timeout: float, with_kernels: bool) -> dict[Entry, Probed]:
    """Return what the process for entries of one distribution told of each, and of one in which it ended, that."""
    question = {
        "distribution": entries[0].distribution,
        "names": [(entry.kind, entry.name) for entry in entries],
        "stages": [stage.name for stage in Stage if with_kernels or stage is not Stage.KERNELS],
    }
    command = [sys.executable, "-c", _CODE, json.dumps(sys.path), json.dumps(question)]
    with (
        tempfile.TemporaryFile("w+", errors="replace") as out,
        tempfile.TemporaryFile("w+", errors="replace") as said,
    ):
        try:
            status = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=said,
                timeout=timeout,
                check=False,
            ).returncode
            how = f"ended the process with status {status}"
        except subprocess.TimeoutExpired:
            how = f"was not over after {timeout:.0f} s"
        out.seek(0)
        said.seek(0)
        how += f": {next(iter(reversed(said.read().strip().splitlines())), 'it said nothing')}"
        return _told(entries, out.read().split(_MARK)[1:], how)


def _told(entries: Sequence[Entry], lines: Sequence[str], how: str) -> dict[Entry, Probed]:
    """Read what a process told; `how` it ended counts where it did not tell that it was over."""
    found: dict[tuple[str, str], Probed] = {}
    doing, is_over = ("", "", Stage.IMPORT), False
    for line in lines:
        record = json.loads(line.partition("\n")[0])
        is_over = record == _OVER
        if "doing" in record:
            doing = record["kind"], record["name"], Stage[record["doing"]]
        elif not is_over:
            found[record["kind"], record["name"]] = _read(record)
    kind, name, stage = doing
    for entry in () if is_over else entries:
        key = entry.kind, entry.name
        empty = Probed(*key, "", 0.0)
        if key == (kind, name):
            found[key] = replace(found.get(key, empty), error=f"{stage} {how}", failed_in=stage)
        elif key not in found:
            found[key] = replace(
                empty, error=f"before it was asked, {stage} of {kind} {name} {how}"
            )
    return {entry: found[entry.kind, entry.name] for entry in entries}


def _read(record: dict[str, Any]) -> Probed:
    needs = tuple(Need(**need) for need in record.pop("needs"))
    record |= {name: tuple(record[name]) for name in ("heavy", "dangling", "computes", "contracts")}
    return Probed(**{**record, "failed_in": Stage(record["failed_in"])}, needs=needs)


def answer(question: str) -> None:
    """Ask the entries that are asked for, and print what happened; runs in the process of its own.

    Each stage is over for all of them before the next begins: the time of an import counts what it imports itself.
    """
    asked, out = json.loads(question), sys.stdout
    logging.getLogger("tokenspeed.plugins").disabled = True

    def tell(record: dict[str, Any]) -> None:
        print(f"{_MARK}{json.dumps(record)}", file=out, flush=True)

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        readable = [each.distribution for each in read(distributions())[0]]
        entries = Catalog.discover(Selection(), check=False, distributions=readable).all()
        names = {tuple(name) for name in asked["names"]}
        mine = [
            each
            for each in entries
            if each.distribution == asked["distribution"]
            and (each.kind, each.name) in names
            and each.status in (Status.OK, Status.FAILED)
        ]
        found: dict[Entry, Probed] = {}
        for stage in (Stage[name] for name in asked["stages"]):
            for entry in mine:
                if entry not in found or not found[entry].error:
                    tell({"kind": entry.kind, "name": entry.name, "doing": stage.name})
                    found[entry] = _at(stage, entry, entries, found.get(entry))
                    tell(asdict(found[entry]))
    tell(_OVER)


def _at(stage: Stage, entry: Entry, entries: Sequence[Entry], known: Probed | None) -> Probed:
    """Return what is known of an entry after a stage."""
    if known is None:
        alone = replace(
            entry, status=Status.OK, reason=""
        )  # a clash may be settled where it was asked
        return _probe(Catalog([alone]), alone)
    error = ""
    if stage is Stage.START:
        error = judged(entry, entries).reason
    elif entry.kind.startswith("kernels.") and not known.dangling:
        error = "; ".join(dict.fromkeys(kernel_failures(entry, entries)))
    return replace(known, error=error, failed_in=stage)


def _probe(catalog: Catalog, entry: Entry) -> Probed:
    before, start = set(sys.modules), time.perf_counter()
    value = catalog.load(entry, object)
    seconds = time.perf_counter() - start
    heavy = tuple(name for name in HEAVY if name in sys.modules and name not in before)
    (after,) = catalog.all()
    parts = value if isinstance(value, tuple) else (value,)
    needs = {
        module: Need(module, _exists(module), str(getattr(part, "obtain", "")))
        for part in parts
        for module in getattr(part, "requires", ())
        if isinstance(module, str)
    }
    dangling = (
        () if any(not need.is_installed for need in needs.values()) else tuple(_dangling(parts))
    )
    return Probed(
        entry.kind,
        entry.name,
        after.reason,
        seconds,
        heavy=heavy,
        needs=tuple(needs.values()),
        dangling=dangling,
        computes=tuple(dict.fromkeys(part.op for part in parts if isinstance(part, KernelSpec))),
        contracts=tuple(contract_record(part) for part in parts if isinstance(part, OpContract)),
    )


def contract_record(contract: OpContract) -> dict[str, Any]:
    """Return what an author of a backend reads of an op, for JSON, whatever a plugin wrote there."""
    words = ("name", "family", "signature", "errors", "reference", "inputs")
    return {
        **{word: str(getattr(contract, word)) for word in words},
        "axes": {str(axis): str(meaning) for axis, meaning in contract.axes.items()},
        **{
            word: [str(each) for each in getattr(contract, word)]
            for word in ("mutates", "rows", "parts")
        },
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
