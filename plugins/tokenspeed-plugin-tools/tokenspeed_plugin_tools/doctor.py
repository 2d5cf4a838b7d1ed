"""`tokenspeed plugins doctor`: every installation that is broken, stale, doubled or unfit, and what mends it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from importlib.metadata import distributions
from itertools import groupby
from typing import Annotated

import typer

from tokenspeed_core import TokenSpeedError
from tokenspeed_core.commands import Catalog, Entry, Selection, Status
from tokenspeed_plugin_tools import findings
from tokenspeed_plugin_tools.editables import of_editables
from tokenspeed_plugin_tools.installed import Finding, Installed, read
from tokenspeed_plugin_tools.layout import shown
from tokenspeed_plugin_tools.probe import probe


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="for machines")] = False,
    no_plugins: Annotated[
        bool, typer.Option("--no-plugins", help="import the default distributions only")
    ] = False,
) -> int:
    """Look at every plugin, the switched-off ones too, and import those that are on; 1 where something is wrong.

    Where the environment's lock is not met, nothing is imported.
    """
    installed, found = read(distributions())
    everything, chosen, selection = _judge(installed, no_plugins=no_plugins)
    found += selection
    found += findings.of_metadata(installed)
    found += of_editables(distributions())
    gone = {each.distribution for each in found if each.is_code_gone}
    found += findings.of_status(
        entry for entry in _worst(everything, chosen) if entry.distribution not in gone
    )
    unlocked = findings.of_lock(chosen)
    found += unlocked
    if not unlocked:
        found += findings.of_probes(
            probe([entry for entry in chosen if entry.distribution not in gone])
        )
    unique = sorted(dict.fromkeys(found), key=lambda each: (each.is_note, each.distribution))
    problems = [each for each in unique if not each.is_note]
    if as_json:
        print(
            json.dumps(
                {"is_healthy": not problems, "findings": [asdict(each) for each in unique]},
                indent=2,
            )
        )
    else:
        print(shown(report(unique, len(everything), len({each.name for each in installed}))))
    return 1 if problems else 0


def _judge(
    installed: list[Installed], *, no_plugins: bool
) -> tuple[tuple[Entry, ...], tuple[Entry, ...], list[Finding]]:
    """Return all entries, the entries as the user's selection has them, and what is wrong with the selection."""
    readable = [each.distribution for each in installed]
    everything = Catalog.discover(Selection(), check=False, distributions=readable).all()
    wrong: list[Finding] = []
    try:
        selection = Selection.read(no_plugins=no_plugins)
        chosen = Catalog.discover(selection, check=False, distributions=readable).all()
    except TokenSpeedError as error:
        wrong.append(
            Finding("TOKENSPEED_PLUGINS", "", str(error), "correct the variable, or unset it")
        )
        chosen = Catalog.discover(Selection(frozenset()), check=False, distributions=readable).all()
    return everything, chosen, wrong


def _worst(everything: tuple[Entry, ...], chosen: tuple[Entry, ...]) -> list[Entry]:
    """Return the entries with what is wrong with them; a clash that the selection settled is none."""
    judged = {_key(entry): entry for entry in chosen}
    worst = []
    for entry in everything:
        as_chosen = judged.get(_key(entry), entry)
        settled = entry.status is Status.FAILED and as_chosen.status is not Status.FAILED
        worst.append(replace(entry, status=Status.DISABLED) if settled else entry)
    return worst


def _key(entry: Entry) -> tuple[str, str, str, str]:
    return entry.distribution, entry.version, entry.kind, entry.name


def report(found: list[Finding], num_plugins: int, num_distributions: int) -> str:
    """Lay the findings out by distribution, problems first."""
    notes = sum(each.is_note for each in found)
    problems = len(found) - notes
    counts = f"{problems or 'no'} problem{'s' * (problems != 1)}"
    counts += f", {notes} note{'s' * (notes != 1)}" if notes else ""
    lines = [f"{counts} in {num_plugins} plugins of {num_distributions} distributions"]
    for (name, number), group in groupby(found, key=lambda each: (each.distribution, each.version)):
        lines += ["", f"{name} {number}".rstrip()]
        for each in group:
            lines += [f"  {'note: ' * each.is_note}{each.what}", f"  -> {each.mend}"]
    return "\n".join(lines)
