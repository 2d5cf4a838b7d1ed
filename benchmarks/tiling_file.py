"""Update and write the measured tilings of experts, as in `tokenspeed_kernels/triton/moe/tuned.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from tokenspeed_kernels.triton.moe.tuned import FILE, Row, Tables, read_tables, table_key

Table = Iterable[tuple[float, Any]]  # the largest average of pairs per expert, and the tiling


def update(path: Path, capability: tuple[int, int], new: Mapping[str, Table]) -> None:
    """Write tables of ops for a compute capability, and keep the file's other tables.

    If there is no file yet, the other tables are the installed ones.
    """
    tables = read_tables(path if path.exists() else FILE)
    for op, table in new.items():
        tables[op] = {**tables[op], table_key(capability): rows_of(table)}
    path.write_text(text_of(tables), encoding="utf-8")


def tuned_table(
    table: Table, times: Sequence[tuple[float, Mapping[Any, float]]]
) -> Iterator[tuple[float, Any]]:
    """Yield a table with the best tiling for each range of pairs per expert, the old one for ranges without times.

    `times` holds cases: the pairs per expert, and the µs of each tiling. The best tiling of a range was timed in all of
    its cases, and has the lowest slowdown against the fastest tiling of each case (geometric mean).
    """
    lower = 0.0
    for bound, current in table:
        cases = [found for average, found in times if lower < average <= bound]
        best, lowest = current, math.inf
        for tiling in cases[0] if cases else ():
            if all(tiling in found for found in cases):
                slowdown = math.prod(found[tiling] / min(found.values()) for found in cases)
                if slowdown < lowest:
                    best, lowest = tiling, slowdown
        yield bound, best
        lower = bound


def rows_of(table: Table) -> list[Row]:
    """Return the rows of a table for the file."""
    return [[None if math.isinf(bound) else bound, fields_of(each)] for bound, each in table]


def fields_of(value: Any) -> Any:
    """Return the fields of a tiling that differ from their defaults."""
    if not is_dataclass(value):
        return value
    found = {each.name: (each.default, getattr(value, each.name)) for each in fields(value)}
    return {
        name: fields_of(given)
        for name, (default, given) in found.items()
        if default is MISSING or given != default
    }


def text_of(tables: Tables) -> str:
    """Return the file with a line per tiling."""
    ops = []
    for op, by_device in tables.items():
        devices = [
            f"    {json.dumps(key)}: [\n      "
            + ",\n      ".join(map(json.dumps, rows))
            + "\n    ]"
            for key, rows in by_device.items()
        ]
        ops.append(f"  {json.dumps(op)}: {{\n" + ",\n".join(devices) + "\n  }")
    return "{\n" + ",\n".join(ops) + "\n}\n"
