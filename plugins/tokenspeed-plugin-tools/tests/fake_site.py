"""A folder into which tests install plugins, as pip would."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Site:
    """A folder of distributions."""

    path: Path

    def install(
        self,
        name: str,
        entries: dict[str, str],
        *,
        version: str = "1.0",
        requires: str = "",
        files: dict[str, str] | None = None,
    ) -> Path:
        """Write the metadata of a distribution and its files; return the metadata's folder.

        `entries` maps "kind name" to an entry point's value, `files` paths to texts.
        """
        info = self.path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        needs = f"Requires-Dist: {requires}\n" if requires else ""
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
        )
        lines = [
            f"[tokenspeed.{key.split()[0]}]\n{key.split()[1]} = {value}\n"
            for key, value in entries.items()
        ]
        (info / "entry_points.txt").write_text("".join(lines))
        for path, text in (files or {}).items():
            target = self.path / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        recorded = [
            *(files or {}),
            f"{info.name}/METADATA",
            f"{info.name}/entry_points.txt",
            f"{info.name}/RECORD",
        ]
        (info / "RECORD").write_text("".join(f"{path},,\n" for path in recorded))
        return info
