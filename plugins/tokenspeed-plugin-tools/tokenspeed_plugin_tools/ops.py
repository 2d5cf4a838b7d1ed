"""`tokenspeed plugins list --ops`: every op that has a contract here, who brings it, and which backends compute it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tokenspeed_testing.shapes import common_contracts

from tokenspeed_core.commands import Entry
from tokenspeed_plugin_tools.layout import aligned, folded, printable
from tokenspeed_plugin_tools.probe import Probed, contract_record, probe

HEADER = ("OP", "FAMILY", "FROM", "BACKENDS")
CORE = "tokenspeed-core"


def print_ops(entries: Iterable[Entry], *, as_json: bool) -> None:
    """Print a line per op; whole contracts for machines. Imports the descriptors of ops and kernels, elsewhere."""
    found = known_ops(
        probe(
            [
                entry
                for entry in entries
                if entry.kind == "ops" or entry.kind.startswith("kernels.")
            ],
            with_kernels=False,
        )
    )
    if as_json:
        print(json.dumps(found, indent=2))
        return
    rows = [
        (op["name"], op["family"], op["from"], ", ".join(op["backends"]) or "-") for op in found
    ]
    lines = aligned([HEADER, *rows])
    if sys.stdout.isatty():
        indent = len(lines[0]) - len(HEADER[-1])
        width = shutil.get_terminal_size((80, 24)).columns
        lines = [part for line in lines for part in folded(line, min(indent, width // 2), width)]
    print(printable("\n".join(lines)))


def known_ops(probed: Mapping[Entry, Probed]) -> list[dict[str, Any]]:
    """Return the contracts of the core and of what was probed, by family and name, each with its backends."""
    contracts = {op.name: {**contract_record(op), "from": CORE} for op in common_contracts()}
    backends: dict[str, set[str]] = {}
    for entry, told in probed.items():
        for contract in told.contracts:
            contracts.setdefault(contract["name"], {**contract, "from": entry.distribution})
        for op in told.computes:
            backends.setdefault(op, set()).add(entry.name)
    found = [
        {**contract, "backends": sorted(backends.get(name, ()))}
        for name, contract in contracts.items()
    ]
    return sorted(found, key=lambda op: (op["family"], op["name"]))


def contract_lines(op: Mapping[str, Any]) -> Iterator[str]:
    """Lay a contract out for people."""
    yield f"{op['name']} ({op['family']})"
    yield f"  called    {op['signature']}"
    for axis, meaning in op["axes"].items():
        yield f"  axis      {axis}: {meaning}"
    for word, names in (("in place", op["mutates"]), ("fused of", op["parts"])):
        if names:
            yield f"  {word:<9} {', '.join(names)}"
    yield f"  errors    {op['errors']}"
    yield f"  means     {op['reference']}"
    yield f"  inputs    {op['inputs']}"
    for each in op["tolerances"]:
        bounds = f"relative {each['relative']:g}, absolute {each['absolute']:g}"
        yield f"  within    {each['dtype']}: {bounds}; {each['source']}"
