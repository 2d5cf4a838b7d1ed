"""What a distribution uses of the core: as its sources say it, and as what they load holds it. Imports no torch.

Sources are read, not run: import statements, calls of `import_module`, `__import__` and the like and look-ups in
`sys.modules` with names that are written out, and attributes of the core's modules. `python -m` this module with a
distribution's name loads what its entries name, in a process of its own, and prints what that holds of the core.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import tokenspeed_core
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.plugins.entry import Entry, Status, load_target
from tokenspeed_core.plugins.selection import Selection, normalise

CORE = tokenspeed_core.__name__
_LISTING = tuple(
    f"{CORE}.{name}" for name in ("api", "commands", "commands.planning", "commands.settings")
)
"""The public modules of which only `__all__` is public."""
_BY_NAME = (
    "import_module",
    "__import__",
    "resolve_name",
    "find_spec",
    "reload",
    "run_module",
)  # take a module's name
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*\Z")


def is_public(name: str) -> bool:
    """Say whether a dotted name of the core may be used by a plugin. What follows a public name are its attributes."""
    first, *rest = name.removeprefix(CORE).removeprefix(".").split(".")
    if first in ("api", "commands"):
        is_module = first == "commands" and bool(rest) and f"{CORE}.commands.{rest[0]}" in _LISTING
        listing, key = (f"{first}.{rest[0]}", rest[1:2]) if is_module else (first, rest[:1])
        return not key or key[0] in ("*", *import_module(f"{CORE}.{listing}").__all__)
    if first == "testing":
        return not any(each.startswith("_") for each in rest[:2])
    return first in ("", "*", "__version__", *tokenspeed_core.__all__)


def entries_of(distribution: str) -> tuple[Entry, ...]:
    """Return the entries of an installed distribution. Raises AssertionError where there are none."""
    wanted = normalise(distribution)
    found = tuple(
        e for e in Catalog.discover(Selection(), check=False).all() if e.distribution == wanted
    )
    assert found, f"{wanted} is not installed, or names no entry point of a group `tokenspeed.*`"
    return found


def packages(entries: Sequence[Entry]) -> list[Path]:
    """Return the folders of the top-level packages that entries are in."""
    specs = [importlib.util.find_spec(name) for name in _tops(entries)]
    return [
        Path(spec.origin).parent
        for spec in specs
        if spec and spec.origin and spec.submodule_search_locations
    ]


def sources(distribution: str) -> list[Path]:
    """Return the Python files of a distribution: of what its entries name, and all that its metadata records."""
    recorded = importlib.metadata.files(distribution) or ()
    found = {
        Path(str(each.locate())).resolve()
        for each in recorded
        if each.suffix == ".py" and not each.name.startswith("__editable__")
    }  # what pip wrote for itself
    for name in _tops(entries_of(distribution)):
        spec = importlib.util.find_spec(name)
        folders = (spec and spec.submodule_search_locations) or ()
        found |= {path.resolve() for folder in folders for path in Path(folder).rglob("*.py")}
        if spec and spec.origin and not folders:
            found.add(Path(spec.origin).resolve())
    return sorted(path for path in found if path.is_file() and path.suffix == ".py")


def core_uses(distribution: str) -> Iterator[tuple[Path, int, str]]:
    """Yield (file, line, dotted name) for each use of the core that a distribution's sources show."""
    for path in sources(distribution):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        known = _bound(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.stmt | ast.expr):
                yield from (
                    (path, node.lineno, name) for name in _named(node, known) if _is_core(name)
                )


def internals_held(distribution: str) -> list[str]:
    """Load what a distribution's entries name, and return what of the core's internals its modules then hold.

    That is, however they came by it, classes, functions and modules in the globals of modules of the distribution's
    top-level packages. What does not load is left out.
    """
    entries = entries_of(distribution)
    _load([entry for entry in entries if entry.status is Status.OK])
    tops = _tops(entries)
    mine = {
        name: module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in tops and module
    }
    public = tuple(origin for value in _public_values() if (origin := _origin(value)))
    return sorted(
        {
            f"{name}.{key} is {origin}"
            for name, module in mine.items()
            for key, value in vars(module).items()
            if (origin := _origin(value))
            and not is_public(origin)
            and not any(origin == each or origin.startswith(f"{each}.") for each in public)
        }
    )


def _load(entries: Sequence[Entry]) -> None:
    """Import the entries' values, and what their texts that read `module:attribute` name."""
    catalog = Catalog(entries)
    for entry in entries:
        value = catalog.load(entry, object)
        for each in value if isinstance(value, tuple) else (value,):
            for key in getattr(type(each), "__slots__", None) or getattr(each, "__dict__", {}):
                text = getattr(each, key, None)
                if isinstance(text, str) and _TARGET.match(text):
                    with suppress(Exception, SystemExit):  # a vendor's library may not be here
                        load_target(text)


def _public_values() -> Iterator[Any]:
    for loaded in map(import_module, (CORE, *_LISTING)):
        yield from (getattr(loaded, name) for name in loaded.__all__)


def _origin(value: Any) -> str:
    """Return the dotted name of a class, function or module of the core, "" for anything else."""
    if isinstance(value, ModuleType):
        return value.__name__ if _is_core(value.__name__) else ""
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return ""
    module = str(getattr(value, "__module__", ""))
    return f"{module}.{getattr(value, '__qualname__', value)}" if _is_core(module) else ""


def _tops(entries: Sequence[Entry]) -> list[str]:
    return sorted({entry.value.partition(":")[0].partition(".")[0] for entry in entries})


def _is_core(name: str) -> bool:
    return name.partition(".")[0] == CORE


def _bound(tree: ast.Module) -> dict[str, str]:
    """Return what of the core import statements bind, by the name that a source has for it and for nothing else."""
    known: dict[str, str] = {}
    others: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in filter(lambda each: _is_core(each.name), node.names):
                known[alias.asname or CORE] = alias.name if alias.asname else CORE
        elif (
            isinstance(node, ast.ImportFrom)
            and node.module
            and not node.level
            and _is_core(node.module)
        ):
            known |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            others.add(node.id)
        elif isinstance(node, ast.arg):
            others.add(node.arg)
    return {name: value for name, value in known.items() if name not in others}


def _named(node: ast.AST, known: Mapping[str, str]) -> Iterator[str]:
    """Yield the dotted names that a node of a source uses."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Attribute):
        yield _dotted(node, known)
    elif isinstance(node, ast.Subscript):
        if ast.unparse(node.value).endswith("modules"):  # sys.modules, whatever sys is called
            yield _text(node.slice)
    elif isinstance(node, ast.Call):
        called = ast.unparse(node.func).rpartition(".")[2]
        words = [_text(each) for each in (*node.args, *(each.value for each in node.keywords))]
        if called in _BY_NAME and words and words[0]:
            package = next((each for each in words[1:] if _is_core(each)), "")
            yield (
                importlib.util.resolve_name(words[0], package)
                if package
                else words[0].replace(":", ".")
            )
        elif called == "getattr" and len(words) > 1 and words[1]:
            yield f"{_dotted(node.args[0], known)}.{words[1]}"
        elif called == "get" and ast.unparse(node.func).endswith("modules.get") and words:
            yield words[0]


def _dotted(node: ast.expr, known: Mapping[str, str]) -> str:
    """Return the dotted name that an attribute of something imported from the core stands for, "" for others."""
    if isinstance(node, ast.Name):
        return known.get(node.id, "")
    if isinstance(node, ast.Attribute) and (of := _dotted(node.value, known)):
        return f"{of}.{node.attr}"
    return ""


def _text(node: ast.expr) -> str:
    """Return a text that is written out, also as a sum of several, "" for anything else."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        return left + right if left and right else ""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


if __name__ == "__main__":
    print(json.dumps(internals_held(sys.argv[1])))
