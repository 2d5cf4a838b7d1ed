"""Write docs/contract.json: every public signature, by surface, beside the version that says when it changed.

A surface whose signatures are not those of its version is refused: an addition raises the version's minor, and what
would break a plugin raises its major (a surface with a single number: any change raises it). Of an op's tolerances, a
wider one is an addition and a tighter one a break: a kernel that kept to the old may fail the new. Rejected, too, is a
deprecation that does not last for its two minors of tokenspeed-core, or that outlasts them.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

PATH = Path(__file__).with_name("contract.json")
CORE = "tokenspeed_core.api"
TESTING = "tokenspeed_testing"
SUITES = (
    "distribution.Distribution",
    "kernel.Kernel",
    "model.Model",
    "parser.Parser",
    "policy.Policy",
)
LAYERS_BESIDE = tuple(
    f"tokenspeed_models.{each}"
    for each in ("config", "describe", "placement", "weights", "testing")
)
OPS_OF = {
    "tokenspeed-kernels-blackwell": "tokenspeed_kernels_blackwell.contracts"
}  # besides TokenSpeed's own
TOLERANCE = " tolerance of "  # in the name of a number that may grow in a minor: what kept to it before still does
Signatures = dict[str, str]


def core() -> Signatures:
    """Return what `API_VERSION` covers, by dotted name; parameters and fields each apart. Ops are TokenSpeed's own."""
    from tokenspeed_core.api import hooks as hookspecs
    from tokenspeed_core.kernels.installed import installed_ops
    from tokenspeed_core.plugins.catalog import Catalog
    from tokenspeed_core.plugins.kinds import KINDS
    from tokenspeed_core.plugins.selection import Selection

    found = {**named(CORE), **named("tokenspeed_core"), **suites()}
    for name, value in vars(hookspecs).items():
        if hasattr(value, "tokenspeed_spec"):
            found |= dict(described(f"hook {name}", value))
    found |= contracts(installed_ops(Catalog.discover(Selection(frozenset()))).values())
    return {
        **found,
        **{f"kind {kind}": f"api {each.api}" for kind, each in KINDS.items() if each.is_used},
    }


def suites() -> Signatures:
    """Return the signatures of the conformance kit's classes."""
    found: Signatures = {}
    for suite in SUITES:
        module, _, subject = suite.partition(".")
        name = f"{subject}Conformance"
        value = getattr(import_module(f"{TESTING}.{module}"), name)
        found |= dict(described(f"{TESTING}.{module}.{name}", value))
    return found


def commands() -> Signatures:
    """Return what `COMMANDS_API` covers."""
    package = "tokenspeed_core.commands"
    return {key: text for name in modules(package) for key, text in named(name).items()}


def testing() -> Signatures:
    """Return what `TESTING_API` covers: what the modules of the kit define, without the suites."""
    found: Signatures = {}
    for name in modules(TESTING):
        module = import_module(name)
        for key in defined(Path(module.__file__ or "")):
            found |= dict(described(f"{name}.{key}", getattr(module, key)))
    stable = suites()
    return {name: text for name, text in found.items() if name not in stable}


def modules(package: str) -> list[str]:
    """Return a package and the modules in it."""
    paths = import_module(package).__path__
    return [
        package,
        *(
            f"{package}.{each.name}"
            for each in iter_modules(paths)
            if not each.name.startswith("_")
        ),
    ]


def defined(path: Path) -> list[str]:
    """Return the public names that a module makes itself, but for the version of what it belongs to."""
    names: list[str] = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else ()
        for each in targets:
            names += [inner.id for inner in ast.walk(each) if isinstance(inner, ast.Name)]
    return [name for name in names if not name.startswith("_") and not name.endswith("_API")]


def layers() -> Signatures:
    """Return what `LAYERS_API` covers."""
    found = named("tokenspeed_models.layers")
    for module in map(import_module, LAYERS_BESIDE):
        for key in defined(Path(module.__file__ or "")):
            found |= dict(described(f"{module.__name__}.{key}", getattr(module, key)))
    return found


def ops_of(distribution: str) -> Signatures:
    """Return what `OPS_API` covers in a distribution that brings ops."""
    from tokenspeed_core.plugins.catalog import Catalog
    from tokenspeed_core.plugins.selection import Selection

    catalog = Catalog.discover(Selection())
    entries = [entry for entry in catalog.entries("ops") if entry.distribution == distribution]
    return contracts(op for entry in entries for op in catalog.need(entry, tuple))


def contracts(ops: Iterable[Any]) -> Signatures:
    """Return what op contracts say, and how far from the reference a kernel may be."""
    said = ("family", "signature", "axes", "mutates", "rows", "parts", "errors")
    found: Signatures = {}
    for op in ops:
        found |= {f"op {op.name}.{field}": str(getattr(op, field)) for field in said}
        for each in op.tolerances:
            found |= {
                f"op {op.name}.{part}{TOLERANCE}{each.dtype}": str(getattr(each, part))
                for part in ("relative", "absolute")
            }
    return found


def surfaces() -> Mapping[str, tuple[str, Callable[[], Signatures]]]:
    """Return the version that the code states for each surface, and what reads its signatures."""
    from tokenspeed_testing import TESTING_API

    from tokenspeed_core.api import API_VERSION
    from tokenspeed_core.commands import COMMANDS_API
    from tokenspeed_models.layers import LAYERS_API

    ops = {
        f"ops of {name}": (str(import_module(module).OPS_API), partial(ops_of, name))
        for name, module in OPS_OF.items()
    }
    return {
        CORE: (API_VERSION, core),
        "tokenspeed_core.commands": (str(COMMANDS_API), commands),
        TESTING: (str(TESTING_API), testing),
        "tokenspeed_models.layers": (str(LAYERS_API), layers),
        **ops,
    }


def named(module: str) -> Signatures:
    """Return the signatures of the names that a module lists, but for its version."""
    loaded = import_module(module)
    return {
        key: text
        for name in loaded.__all__
        if name != "API_VERSION" and not name.endswith("_API")
        for key, text in described(f"{module}.{name}", getattr(loaded, name))
    }


def described(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield (dotted name, text) for a value: its fields, methods and parameters, or the value itself."""
    if inspect.isclass(value):
        yield name, f"class({', '.join(base.__name__ for base in value.__bases__)})"
        fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        for field in fields:
            has_default = (
                field.default is not dataclasses.MISSING
                or field.default_factory is not dataclasses.MISSING
            )
            yield f"{name}.{field.name}", f"{field.type}{' = ...' if has_default else ''}"
        if issubclass(value, Enum):
            yield from ((f"{name}.{member.name}", repr(member.value)) for member in value)
        elif not fields:
            yield from attributes(name, value)
        for key, each in vars(value).items():
            is_public = (
                not key.startswith("_") or (key == "__init__" and not fields) or key == "__call__"
            )
            each = inspect.unwrap(
                each.__func__ if isinstance(each, classmethod | staticmethod) else each
            )
            if is_public and inspect.isfunction(each) and each.__module__.startswith("tokenspeed"):
                yield from described(f"{name}.{key}", each)
            elif is_public and isinstance(each, property):
                yield f"{name}.{key}", "property"
    elif inspect.isfunction(value):
        from tokenspeed_core import __version__

        signature = inspect.signature(value)
        yield name, f"-> {signature.return_annotation}"
        for parameter in signature.parameters.values():
            yield f"{name}({parameter.name})", str(parameter).replace(repr(__version__), "...")
    else:
        yield (
            name,
            " ".join(f"{value!r}".split())
            if isinstance(value, tuple | str | int)
            else type(value).__name__,
        )


def attributes(name: str, value: type) -> Iterator[tuple[str, str]]:
    """Yield (dotted name, text) for what a class that is no dataclass says that its objects have."""
    optional = {
        key for key, each in getattr(value, "model_fields", {}).items() if not each.is_required()
    }
    for key, text in vars(value).get("__annotations__", {}).items():
        if not key.startswith("_") and key != "model_config":
            yield f"{name}.{key}", f"{text}{' = ...' if key in optional else ''}"


def digest(signatures: Signatures) -> str:
    """Return a short hash, which belongs to one version for ever."""
    return hashlib.sha256(json.dumps(signatures, sort_keys=True).encode()).hexdigest()[:16]


def broken(before: Signatures, after: Signatures) -> list[str]:
    """Return what a plugin written for `before` may stumble over in `after`."""
    gone = [
        name
        for name, text in before.items()
        if after.get(name) != text and not is_wider(name, text, after)
    ]
    demands = [
        name
        for name, text in after.items()
        if name not in before
        and name.endswith(")")
        and "=" not in text
        and "*" not in text
        and name.partition("(")[0] in before
    ]
    return [*gone, *demands]


def is_wider(name: str, text: str, after: Signatures) -> bool:
    """Say whether a name is a tolerance that is larger than it was: every kernel that kept to it still does."""
    return TOLERANCE in name and name in after and float(after[name]) > float(text)


def misversioned(old: Mapping[str, Any], version: str, signatures: Signatures) -> str:
    """Return why these signatures cannot have this version beside what is recorded, "" where they can."""
    said = old.get("versions", {}).get(version)
    if said == digest(signatures):
        return ""
    changed = broken(old.get("signatures", {}), signatures)
    if said is not None:
        added = sorted(
            name
            for name, text in signatures.items()
            if old["signatures"].get(name) != text and name not in changed
        )
        return (
            f"version {version} is another contract; raise it for: {', '.join([*changed, *added])}"
        )
    last = list(old.get("versions", {"0": ""}))[-1]
    if changed and "." in version and version.split(".")[0] == last.split(".")[0]:
        return f"these changed or went, which is a new major after {last}: {', '.join(changed)}"
    return ""


def deprecations() -> dict[str, list[str]]:
    """Return what the core deprecates: since when, until when, and what replaces it."""
    from tokenspeed_core.plugins.deprecations import DEPRECATED

    return {old: list(each) for old, each in DEPRECATED.items()}


def offered() -> set[str]:
    """Return all that can be deprecated and is there, named as a deprecation names it."""
    from tokenspeed_core.config.schema import Config, flag
    from tokenspeed_core.plugins.deprecations import contract
    from tokenspeed_core.plugins.kinds import KINDS

    contracts = (
        contract(kind, number) for kind, each in KINDS.items() for number in range(1, each.api + 1)
    )
    return {*core(), *contracts, *(f"flag {flag(name)}" for name in Config.model_fields)}


def untimely(
    recorded: Mapping[str, list[str]],
    rows: Mapping[str, list[str]],
    there: Collection[str],
    version: str,
) -> list[str]:
    """Return what is wrong with the deprecations `rows` in a version of the core, beside those last recorded.

    `there` is what the core offers. What was announced holds: a thing stays for its two minors, and not for longer.
    """
    now, wrong = minor(version), []
    for old, (since, goes, replacement) in rows.items():
        if minor(goes) != (minor(since)[0], minor(since)[1] + 2):
            wrong.append(f"{old}: goes with {goes}, which is not two minors after {since}")
        elif now >= minor(goes):
            wrong.append(
                f"{old}: was to go with {goes}, and this is {version}; remove it and its row"
            )
        elif old not in there:
            wrong.append(f"{old}: is gone, and was to stay until {goes}; put it back")
        if not replacement:
            wrong.append(f"{old}: names nothing that replaces it")
    for old, row in recorded.items():
        if now < minor(row[1]) and list(rows.get(old, ()))[:2] != row[:2]:
            wrong.append(f"{old}: was announced to go with {row[1]}; put its row back as it was")
    return wrong


def minor(version: str) -> tuple[int, int]:
    """Return the major and the minor of a version."""
    major, second = version.split(".")[:2]
    return int(major), int(second)


def main() -> int:
    """Write the file, or say what keeps it from being written."""
    from tokenspeed_core import __version__

    recorded = json.loads(PATH.read_text()) if PATH.is_file() else {}
    announced = recorded.get(CORE, {}).get("deprecated", {})
    if wrong := untimely(announced, deprecations(), offered(), __version__):
        print("\n".join(wrong), file=sys.stderr)
        return 1
    made = {}
    for surface, (version, read) in surfaces().items():
        old, signatures = recorded.get(surface, {}), read()
        if complaint := misversioned(old, version, signatures):
            print(f"{surface}: {complaint}", file=sys.stderr)
            return 1
        versions = {**old.get("versions", {}), version: digest(signatures)}
        made[surface] = {"version": version, "versions": versions, "signatures": signatures}
    made[CORE]["deprecated"] = deprecations()
    PATH.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
