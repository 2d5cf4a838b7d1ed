"""The conformance of an installed distribution as a class to inherit; it needs no tensor library.

Subclasses set `distribution = "acme-attention"`.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import tokenspeed_core
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.plugins.deprecations import DEPRECATED, contract
from tokenspeed_core.plugins.entry import Entry, Status
from tokenspeed_core.plugins.metadata import check_build
from tokenspeed_core.plugins.selection import Selection, normalise

HEAVY = ("torch", "triton", "transformers", "jax", "tensorflow")
MOST_SECONDS = 0.3  # of the processor's time, to import what an entry names beyond the core's own api
PUBLIC = ("tokenspeed_core.api", "tokenspeed_core.commands", "tokenspeed_core.testing")
_PROBE = """
import importlib, json, sys, time
import tokenspeed_core.api
before, start = set(sys.modules), time.process_time()
importlib.import_module({module!r})
print(json.dumps([time.process_time() - start, sorted(set(sys.modules) - before)]))
"""


class DistributionConformance:
    """What is asked of any plugin distribution, whatever it provides. Subclasses set `distribution`."""

    distribution: ClassVar[str]

    def test_its_metadata_names_known_kinds_their_api_and_the_core_it_needs(self) -> None:
        """Every entry is usable here, and the distribution says for which tokenspeed-core it was made."""
        for entry in _entries(self.distribution):
            assert entry.status in (Status.OK, Status.SHADOWED), f"{entry.kind} {entry.name}: {entry.reason}"
            assert entry.requires_core, (
                f"{entry.distribution} says no range of tokenspeed-core; write {core_range()!r} in its dependencies"
            )

    def test_it_is_installed_once_and_says_its_version_truly(self) -> None:
        """No second copy on the path, and `__version__`, where a package has one, is that of the metadata."""
        wanted = normalise(self.distribution)
        copies = importlib.metadata.distributions(name=wanted)  # others' metadata may be unreadable
        found = {(str(each.locate_file("")), each.version) for each in copies}
        assert len(found) == 1, f"{wanted} is installed {len(found)} times: {sorted(found)}"
        version = importlib.metadata.version(self.distribution)
        for package in _packages(_entries(self.distribution)):
            said = literal(package / "__init__.py", "__version__")
            assert said in (None, version), f"{package.name}.__version__ is {said}, and its metadata says {version}"

    def test_its_compiled_code_was_built_for_what_is_here(self) -> None:
        """Its wheel's tags fit this Python and platform, and what it requires is installed in a version that fits."""
        misfit = build_misfit(self.distribution)
        assert not misfit, misfit

    def test_importing_what_its_entries_name_loads_no_tensor_library_and_is_quick(self) -> None:
        """Descriptors are imported by every process that chooses; kernels are loaded when they are chosen."""
        for entry in _entries(self.distribution):
            module = entry.value.partition(":")[0]
            done = subprocess.run(
                [sys.executable, "-P", "-c", _PROBE.format(module=module)], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{module} fails to import: {done.stderr.strip().splitlines()[-1:]}"
            seconds, loaded = json.loads(done.stdout.splitlines()[-1])
            heavy = sorted(set(HEAVY) & set(loaded))
            assert not heavy, (
                f"importing {module} loads {', '.join(heavy)}; keep the descriptor apart from what `load` names"
            )
            assert seconds < MOST_SECONDS, f"importing {module} takes {seconds:.2f} s; at most {MOST_SECONDS} s"

    def test_it_imports_only_what_is_public_of_the_core(self) -> None:
        """`tokenspeed_core.api`, `.testing`, and the names that `tokenspeed_core` itself lists."""
        imports = _core_imports(_entries(self.distribution))
        private = [f"{path.name}:{line}: {name}" for path, line, name in imports if not is_public(name)]
        assert not private, f"not public, so they may change without notice: {'; '.join(private)}"

    def test_what_it_uses_and_will_not_be_there_for_long_is_named(self) -> None:
        """Contracts and names of the core that are deprecated: each warns with what replaces it, and none fails."""
        for use in deprecated_uses(self.distribution):
            warnings.warn(use, FutureWarning, stacklevel=1)

    def test_its_entries_load(self) -> None:
        """The descriptors are of the right type, and what they point at exists where their modules do."""
        catalog = Catalog([entry for entry in _entries(self.distribution) if entry.status is Status.OK], strict=True)
        for entry in catalog.all():
            catalog.need(entry, object)


def deprecated_uses(distribution: str) -> list[str]:
    """Return the uses of what is deprecated that an installed distribution's metadata and imports show; none runs."""
    entries = _entries(distribution)
    named = {entry: contract(entry.kind, entry.api) for entry in entries}
    uses = [f"{entry.name}: {old} {DEPRECATED[old]}" for entry, old in named.items() if old in DEPRECATED]
    uses += [
        f"{path.name}:{line}: {name} {DEPRECATED[name]}"
        for path, line, name in _core_imports(entries) if name in DEPRECATED
    ]
    return list(dict.fromkeys(uses))


def build_misfit(distribution: str) -> str:
    """Return what compiled code of a distribution was built for that is not here, "" where it may be loaded."""
    try:
        check_build(distribution)
    except ImportError as error:
        return str(error)
    return ""


def is_public(name: str) -> bool:
    """Say whether a dotted name of the core may be imported by a plugin."""
    if any(name == module or name.startswith(f"{module}.") for module in PUBLIC):
        return True
    return name == "tokenspeed_core" or name.removeprefix("tokenspeed_core.") in (
        *tokenspeed_core.__all__, "__version__", "api", "commands", "testing"
    )


def core_range(version: str = tokenspeed_core.__version__) -> str:
    """Return the range that a package made for a core declares: what is deprecated lives for two minors."""
    major, minor = version.split(".")[:2]
    return f"tokenspeed-core>={major}.{minor},<{major}.{int(minor) + 2}"


def literal(path: Path, name: str) -> str | None:
    """Return the text that a module assigns to a name, without importing it; None where it does not."""
    if not path.is_file():
        return None
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets):
            return str(node.value.value) if isinstance(node.value, ast.Constant) else None
    return None


def _imported(node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Import):
        yield from ((node.lineno, alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def _is_core(name: str) -> bool:
    return name.partition(".")[0] == "tokenspeed_core"


def _entries(distribution: str) -> tuple[Entry, ...]:
    wanted = normalise(distribution)
    found = tuple(e for e in Catalog.discover(Selection(), check=False).all() if e.distribution == wanted)
    assert found, f"{wanted} is not installed, or names no entry point of a group `tokenspeed.*`"
    return found


def _packages(entries: Sequence[Entry]) -> list[Path]:
    """Return the folders of the top-level packages that entries are in."""
    names = sorted({entry.value.partition(":")[0].partition(".")[0] for entry in entries})
    specs = [importlib.util.find_spec(name) for name in names]
    return [Path(spec.origin).parent for spec in specs if spec and spec.origin and spec.submodule_search_locations]


def _core_imports(entries: Sequence[Entry]) -> Iterator[tuple[Path, int, str]]:
    for package in _packages(entries):
        for path in sorted(package.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                yield from ((path, line, name) for line, name in _imported(node) if _is_core(name))
