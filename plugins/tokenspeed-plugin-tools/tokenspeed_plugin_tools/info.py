"""`tokenspeed plugins info`: the properties of one distribution."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from tokenspeed_core.commands import DEFAULTS, Catalog, Entry
from tokenspeed_plugin_tools.installed import entries_of, with_unreadable
from tokenspeed_plugin_tools.lock import enforce_environment, freeze
from tokenspeed_plugin_tools.ops import contract_lines
from tokenspeed_plugin_tools.probe import Probe, probe
from tokenspeed_plugin_tools.text import printable


def info(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A distribution, or a name that it provides.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Print a distribution's origin, its plugins and requirements, and the time of its import."""
    enforce_environment()
    installed = with_unreadable(Catalog.discover(check=False).all())
    record = describe(entries_of(installed, name, "info"))
    print(json.dumps(record, indent=2) if as_json else printable(as_text(record)))
    return 0


def describe(entries: list[Entry]) -> dict[str, Any]:
    """Return the properties of a distribution. Its plugins are imported in another process."""
    first = entries[0]
    probed = probe(entries)
    frozen = freeze(entries)
    needs = {need.module: need for found in probed.values() for need in found.needs}
    return {
        "name": first.distribution,
        "version": first.version,
        "is_default": first.distribution in DEFAULTS,
        "origin": first.origin,
        "sha256": frozen[first.distribution].sha256 or None if frozen else None,
        "requires_core": first.requires_core,
        "import_ms": round(sum(found.seconds for found in probed.values()) * 1000, 1),
        "imports": sorted({library for found in probed.values() for library in found.heavy}),
        "required_modules": {
            module: {"is_installed": need.is_installed, "obtain": need.obtain}
            for module, need in needs.items()
        },
        "provides": [_provided(entry, probed.get(entry)) for entry in entries],
        "ops": [op for found in probed.values() for op in found.contracts],
    }


def _provided(entry: Entry, found: Probe | None) -> dict[str, Any]:
    has_failed = found is not None and bool(found.error)
    return {
        "kind": entry.kind,
        "name": entry.name,
        "api": entry.api,
        "value": entry.value,
        "status": "failed" if has_failed else str(entry.status),
        "reason": found.error if found is not None and has_failed else entry.reason,
        "import_ms": None if found is None else round(found.seconds * 1000, 1),
        "computes": [] if found is None else list(found.computes),
    }


def as_text(record: dict[str, Any]) -> str:
    """Return a description as text."""
    modules = []
    for module, each in record["required_modules"].items():
        state = "installed" if each["is_installed"] else f"missing: {each['obtain'] or 'unknown'}"
        modules.append(f"{module} ({state})")
    heavy = f", imports {', '.join(record['imports'])}" if record["imports"] else ""
    default = "default, " if record["is_default"] else ""
    lines = [
        f"{record['name']} {record['version']}",
        f"  origin    {default}{record['origin']}",
        f"  sha256    {record['sha256'] or 'none: the code is missing'}",
        f"  core      {record['requires_core'] or 'any version'}",
        f"  requires  {', '.join(modules) or 'no other modules'}",
        f"  import    {record['import_ms']} ms{heavy}",
        "  provides",
    ]
    width = max(len(f"{each['kind']} {each['name']}") for each in record["provides"])
    for each in record["provides"]:
        what = f"{each['kind']} {each['name']}".ljust(width)
        api = "-" if each["api"] is None else each["api"]
        details = each["reason"] or ", ".join(each["computes"])
        suffix = f": {details}" if details else ""
        lines.append(f"    {what}  api {api}  {each['status']}{suffix}")
    for op in record["ops"]:
        lines += ["", *(f"  {line}" for line in contract_lines(op))]
    return "\n".join(lines)
