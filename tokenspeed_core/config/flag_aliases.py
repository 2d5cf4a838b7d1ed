"""Names that this engine does not take: other engines' with what to use here, and those that are not built yet."""

from __future__ import annotations

from pathlib import Path

TABLES = Path(__file__).with_suffix(".yaml")


def refuse_foreign(name: str) -> str | None:
    """Return what to use in place of a name that is not taken, or None for a name of nobody."""
    import yaml  # a name that was not known ends the program; others start without it

    key = name.replace("-", "_").removeprefix("no_").partition(".")[0]
    for table in yaml.safe_load(TABLES.read_text()):
        if key in table["names"] or key.startswith(tuple(table.get("beginnings", ()))):
            return str(table["says"]).format(table["names"].get(key))
    return None
