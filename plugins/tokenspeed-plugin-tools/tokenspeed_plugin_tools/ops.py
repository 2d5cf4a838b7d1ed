"""`tokenspeed plugins list --ops`: the ops, who defines them and which backends implement them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tokenspeed_testing.shapes import common_contracts

from tokenspeed_core.commands import Entry
from tokenspeed_plugin_tools.probe import Probe, contract_record, probe
from tokenspeed_plugin_tools.text import columns, printable

HEADER = ("OP", "FAMILY", "FROM", "BACKENDS")
CORE = "tokenspeed-core"


def print_ops(entries: Iterable[Entry], *, as_json: bool) -> None:
    """Print one line per op, or whole contracts as JSON."""
    kernels_and_ops = [
        entry for entry in entries if entry.kind == "ops" or entry.kind.startswith("kernels.")
    ]
    found = known_ops(probe(kernels_and_ops, with_kernels=False))
    if as_json:
        print(json.dumps(found, indent=2))
        return
    rows = [
        (op["name"], op["family"], op["from"], ", ".join(op["backends"]) or "-") for op in found
    ]
    print(printable("\n".join(columns([HEADER, *rows]))))


def known_ops(probed: Mapping[Entry, Probe]) -> list[dict[str, Any]]:
    """Return the contracts of all ops with their backends, by family and name."""
    contracts = {op.name: {**contract_record(op), "from": CORE} for op in common_contracts()}
    backends: dict[str, set[str]] = {}
    for entry, found in probed.items():
        for contract in found.contracts:
            contracts.setdefault(contract["name"], {**contract, "from": entry.distribution})
        for op in found.computes:
            backends.setdefault(op, set()).add(entry.name)
    ops = [
        {**contract, "backends": sorted(backends.get(name, ()))}
        for name, contract in contracts.items()
    ]
    return sorted(ops, key=lambda op: (op["family"], op["name"]))


def contract_lines(op: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that describe a contract."""
    yield f"{op['name']} ({op['family']})"
    yield f"  called    {op['signature']}"
    for axis, meaning in op["axes"].items():
        yield f"  axis      {axis}: {meaning}"
    for word, names in (("in place", op["mutates"]), ("fuses", op["parts"])):
        if names:
            yield f"  {word:<9} {', '.join(names)}"
    yield f"  errors    {op['errors']}"
    yield f"  reference {op['reference']}"
    yield f"  inputs    {op['inputs']}"
    for each in op["tolerances"]:
        bounds = f"relative {each['relative']:g}, absolute {each['absolute']:g}"
        yield f"  within    {each['dtype']}: {bounds}; {each['source']}"
