"""Finds imports of the core's internal modules in the sources of a plugin. Runs none of them."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import tokenspeed_core
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.plugins.entry import Entry
from tokenspeed_core.plugins.selection import Selection, normalize

CORE = tokenspeed_core.__name__
PUBLIC_MODULES = (
    CORE,
    f"{CORE}.api",
    f"{CORE}.commands",
    f"{CORE}.commands.planning",
    f"{CORE}.commands.serving",
    f"{CORE}.commands.settings",
    f"{CORE}.commands.workers",
)
"""The modules that plugins may import; of each, the names in its `__all__`."""


def is_public(name: str) -> bool:
    """Say whether a plugin may import a module of the core, or a name from one."""
    if name in (*PUBLIC_MODULES, f"{CORE}.__version__"):
        return True
    module, _, attribute = name.rpartition(".")
    return module in PUBLIC_MODULES and attribute in ("*", *import_module(module).__all__)


def entries_of(distribution: str) -> tuple[Entry, ...]:
    """Return the entries of an installed distribution. Raises AssertionError if it has none."""
    wanted = normalize(distribution)
    installed = Catalog.discover(Selection(), check=False).all()
    found = tuple(entry for entry in installed if entry.distribution == wanted)
    assert found, f"{wanted} is not installed, or declares no entry point in a group `tokenspeed.*`"
    return found


def packages(entries: Sequence[Entry]) -> list[Path]:
    """Return the folders of the entries' top-level packages."""
    specs = [importlib.util.find_spec(name) for name in _top_level_modules(entries)]
    return [
        Path(spec.origin).parent
        for spec in specs
        if spec and spec.origin and spec.submodule_search_locations
    ]


def internal_imports(distribution: str) -> Iterator[tuple[Path, int, str]]:
    """Yield (file, line, dotted name) for each import of an internal name of the core."""
    for path in _sources(entries_of(distribution)):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for name in _imported_names(node):
                if name.partition(".")[0] == CORE and not is_public(name):
                    yield path, node.lineno, name  # type: ignore[attr-defined]


def _sources(entries: Sequence[Entry]) -> list[Path]:
    """Return the Python files of the entries' top-level modules."""
    found: set[Path] = set()
    for name in _top_level_modules(entries):
        spec = importlib.util.find_spec(name)
        if spec is None:
            continue
        for folder in spec.submodule_search_locations or ():
            found.update(Path(folder).rglob("*.py"))
        if spec.origin and spec.origin.endswith(".py"):
            found.add(Path(spec.origin))
    return sorted(found)


def _imported_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def _top_level_modules(entries: Sequence[Entry]) -> list[str]:
    return sorted({entry.value.partition(":")[0].partition(".")[0] for entry in entries})
