"""Let tests import the helper modules in this folder, relax hypothesis' deadlines, and write plugins."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

from made_plugins import Install

# On a shared machine the time of an example says nothing. Every run draws other examples.
settings.register_profile("quick", deadline=None, max_examples=30)
settings.load_profile("quick")


@pytest.fixture
def install(tmp_path: Path) -> Iterator[Install]:
    """Yield a function that writes a distribution's metadata as pip does, and returns all written distributions."""

    def write(
        name: str, entries: str, *, version: str = "1.0", requires: str = "", where: str = "modules"
    ) -> list[Distribution]:
        root = tmp_path / where
        info = root / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        needs = f"Requires-Dist: {requires}\n" if requires else ""
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
        )
        (info / "entry_points.txt").write_text(entries)
        return list(distributions(path=[str(path) for path in sorted(tmp_path.iterdir())]))

    before = set(sys.modules)
    sys.path[:0] = [str(tmp_path / "modules")]
    yield write
    sys.path.remove(str(tmp_path / "modules"))
    for module in set(sys.modules) - before:
        del sys.modules[module]
