"""Conformance of an installed distribution, as a class to inherit. It needs no tensor library.

Subclasses set `distribution = "acme-attention"`.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import tokenspeed_core
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.plugins.entry import Status
from tokenspeed_core.plugins.selection import Selection, normalize
from tokenspeed_testing.imports import entries_of, internal_imports, packages
from tokenspeed_testing.loading import try_load

HEAVY = ("torch", "triton", "transformers", "jax", "tensorflow")
MAX_SECONDS = 0.3  # CPU time to import an entry's module, without the core's api
_PROBE = """
import importlib, json, sys, time
import tokenspeed_core.api
before, start = set(sys.modules), time.process_time()
importlib.import_module({module!r})
print(json.dumps([time.process_time() - start, sorted(set(sys.modules) - before)]))
"""


class DistributionConformance:
    """Checks of any plugin distribution. Subclasses set `distribution`."""

    distribution: ClassVar[str]

    def test_metadata_is_complete(self) -> None:
        """Every entry is usable, and the distribution declares a range of tokenspeed-core."""
        for entry in entries_of(self.distribution):
            assert entry.status is Status.OK, f"{entry.kind} {entry.name}: {entry.reason}"
            assert entry.requires_core, (
                f"{entry.distribution} declares no range of tokenspeed-core. Add {core_range()!r} to its dependencies."
            )

    def test_installed_once_with_its_version(self) -> None:
        """The distribution is installed once, and `__version__` matches the metadata."""
        wanted = normalize(self.distribution)
        copies = importlib.metadata.distributions(name=wanted)  # others' metadata may be unreadable
        found = {(str(each.locate_file("")), each.version) for each in copies}
        assert len(found) == 1, f"{wanted} is installed {len(found)} times: {sorted(found)}"
        version = importlib.metadata.version(self.distribution)
        for package in packages(entries_of(self.distribution)):
            declared = literal(package / "__init__.py", "__version__")
            assert declared in (None, version), (
                f"{package.name}.__version__ is {declared}, but the metadata has version {version}"
            )

    def test_entry_modules_import_fast(self) -> None:
        """Entry modules import quickly and load no tensor library."""
        modules = {entry.value.partition(":")[0] for entry in entries_of(self.distribution)}
        for module in sorted(modules):
            done = subprocess.run(
                [sys.executable, "-P", "-c", _PROBE.format(module=module)],
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, (
                f"{module} fails to import: {done.stderr.strip().splitlines()[-1:]}"
            )
            seconds, loaded = json.loads(done.stdout.splitlines()[-1])
            heavy = sorted(set(HEAVY) & set(loaded))
            assert not heavy, (
                f"importing {module} loads {', '.join(heavy)}. Put the descriptor and the code that it loads in separate modules."
            )
            assert seconds < MAX_SECONDS, (
                f"importing {module} takes {seconds:.2f} s; at most {MAX_SECONDS} s"
            )

    def test_imports_only_public_api(self) -> None:
        """The distribution imports only `tokenspeed_core.api`, `.commands` and the exports of `tokenspeed_core`."""
        private = [
            f"{path.name}:{line}: {name}"
            for path, line, name in internal_imports(self.distribution)
        ]
        assert not private, f"imports internal names of the core: {'; '.join(private)}"

    def test_entries_load(self) -> None:
        """Every entry loads and has the type that its kind requires."""
        everything = Catalog.discover(Selection(), check=False).all()
        usable = (each for each in entries_of(self.distribution) if each.status is Status.OK)
        failed = [
            each
            for each in (try_load(each, everything) for each in usable)
            if each.status is Status.FAILED
        ]
        messages = (
            f"{each.kind} {each.name}: {each.reason}\n{each.traceback}".rstrip() for each in failed
        )
        assert not failed, "\n".join(messages)


def core_range(version: str = tokenspeed_core.__version__) -> str:
    """Return the range of tokenspeed-core that a new plugin declares: this minor version and the next."""
    major, minor = version.split(".")[:2]
    return f"tokenspeed-core>={major}.{minor},<{major}.{int(minor) + 2}"


def literal(path: Path, name: str) -> str | None:
    """Return the string that a module assigns to a name, without importing it, or None."""
    if not path.is_file():
        return None
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets):
            return str(node.value.value) if isinstance(node.value, ast.Constant) else None
    return None
