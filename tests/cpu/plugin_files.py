"""Write the files of an installed plugin distribution."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_plugin(
    site: Path, name: str, kind: str, entries: Mapping[str, str], modules: Mapping[str, str]
) -> None:
    """Write version 1.0 of a distribution with entry points of one kind, and its modules."""
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{entry} = {target}\n" for entry, target in entries.items()]
    (info / "entry_points.txt").write_text(f"[tokenspeed.{kind}]\n{''.join(lines)}")
    for module, source in modules.items():
        (site / f"{module}.py").write_text(source)
