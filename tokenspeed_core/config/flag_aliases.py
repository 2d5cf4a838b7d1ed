"""Messages for flags of other engines, and for features that do not exist yet."""

from __future__ import annotations

from pathlib import Path

TABLES = Path(__file__).with_suffix(".yaml")


def refuse_foreign(name: str) -> str | None:
    """Return what to use instead of an unknown name, or None if the name is not in the table."""
    import yaml  # imported only for unknown names

    key = name.replace("-", "_").removeprefix("no_").partition(".")[0]
    for table in yaml.safe_load(TABLES.read_text()):
        if key in table["names"] or key.startswith(tuple(table.get("beginnings", ()))):
            return str(table["says"]).format(table["names"].get(key))
    return None
