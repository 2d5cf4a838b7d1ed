"""`tokenspeed plugins info`: all that can be known of one distribution."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from tokenspeed_core.commands import DEFAULTS, Catalog, Entry
from tokenspeed_plugin_tools.installed import with_unreadable
from tokenspeed_plugin_tools.layout import shown
from tokenspeed_plugin_tools.lock import enforce_environment, freeze
from tokenspeed_plugin_tools.named import entries_of
from tokenspeed_plugin_tools.ops import contract_lines
from tokenspeed_plugin_tools.origins import publisher
from tokenspeed_plugin_tools.probe import Probed, probe


def info(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="a distribution, or the name of what it provides")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="for machines")] = False,
) -> int:
    """Print where a distribution came from, what it provides and needs, and what its import costs."""
    enforce_environment()
    entries = entries_of(with_unreadable(Catalog.discover(check=False).all()), name, "info")
    record = describe(entries)
    print(json.dumps(record, indent=2) if as_json else shown(as_text(record)))
    return 0


def describe(entries: list[Entry]) -> dict[str, Any]:
    """Return what is known of a distribution; its usable plugins are imported, in a process of their own."""
    first = entries[0]
    probed, frozen = probe(entries), freeze(entries)
    needs = {need.module: need for told in probed.values() for need in told.needs}
    return {
        "name": first.distribution,
        "version": first.version,
        "publisher": publisher(first.distribution),
        "is_default": first.distribution in DEFAULTS,
        "origin": first.origin,
        "is_editable": first.origin.startswith("editable "),
        "sha256": frozen[first.distribution].sha256 or None if frozen else None,
        "requires_core": first.requires_core,
        "import_ms": round(sum(told.seconds for told in probed.values()) * 1000, 1),
        "imports": sorted({library for told in probed.values() for library in told.heavy}),
        "required_modules": {
            module: {"is_installed": need.is_installed, "obtain": need.obtain}
            for module, need in needs.items()
        },
        "provides": [_provided(entry, probed.get(entry)) for entry in entries],
        "ops": [op for told in probed.values() for op in told.contracts],
    }


def _provided(entry: Entry, told: Probed | None) -> dict[str, Any]:
    has_failed = told is not None and bool(told.error)
    return {
        "kind": entry.kind,
        "name": entry.name,
        "api": entry.api,
        "value": entry.value,
        "status": "failed" if has_failed else str(entry.status),
        "reason": told.error if told is not None and has_failed else entry.reason,
        "import_ms": None if told is None else round(told.seconds * 1000, 1),
        "computes": [] if told is None else list(told.computes),
    }


def as_text(record: dict[str, Any]) -> str:
    """Lay a description out for people."""
    needed = (
        f"{module} ({'installed' if each['is_installed'] else 'missing: ' + (each['obtain'] or 'unknown')})"
        for module, each in record["required_modules"].items()
    )
    heavy = f", and brings {', '.join(record['imports'])}" if record["imports"] else ""
    lines = [
        f"{record['name']} {record['version']}",
        f"  origin   {record['publisher']}{' (default)' * record['is_default']}, {record['origin']}",
        f"  sha256   {record['sha256'] or 'none: nothing of it can be used'}",
        f"  core     {record['requires_core'] or 'any version'}",
        f"  needs    {', '.join(needed) or 'no other modules'}",
        f"  import   {record['import_ms']} ms{heavy}",
        "  provides",
    ]
    width = max(len(f"{each['kind']} {each['name']}") for each in record["provides"])
    for each in record["provides"]:
        what = f"{each['kind']} {each['name']}".ljust(width)
        api = "-" if each["api"] is None else each["api"]
        reason = f": {each['reason']}" if each["reason"] else ""
        ops = f": {', '.join(each['computes'])}" if each["computes"] else ""
        lines.append(f"    {what}  api {api}  {each['status']}{reason}{ops}")
    for op in record["ops"]:
        lines += ["", *(f"  {line}" for line in contract_lines(op))]
    return "\n".join(lines)
