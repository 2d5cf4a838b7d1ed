"""Names that this engine does not take: other engines' with what to use here, and those that are not built yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def foreign_names() -> dict[str, Any]:
    """Return the tables of `foreign.yaml`; it is read when a name was not known, which ends the program."""
    import yaml

    tables: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    return tables


def refuse_foreign(name: str) -> str | None:
    """Return what to use in place of a name that is not taken, or None for a name of nobody."""
    key, tables = name.replace("-", "_").removeprefix("no_").partition(".")[0], foreign_names()
    if key in tables["renamed"]:
        return f"that is another engine's name; here it is --{tables['renamed'][key].replace('_', '-')}"
    if key in tables["turned"]:
        return f"that is another engine's name; here use {tables['turned'][key]}"
    if key in tables["needless"]:
        return f"that is another engine's name, and nothing is needed here: {tables['needless'][key]}"
    if key in tables["not_built"] or key.startswith(tuple(tables["not_built_families"])):
        return "not built yet"
    return None
