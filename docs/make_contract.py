"""Write docs/contract.json: every public signature, beside the version that says when it changed.

A surface whose signatures are not those of its version is refused: an addition raises the version's minor, and what
would break a plugin raises its major (a surface with a single number: any change raises it). So is a deprecation that
does not last for its two minors of tokenspeed-core, or that outlasts them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("contract.json")
CORE = "tokenspeed_core.api"
Signatures = dict[str, str]


def core() -> Signatures:
    """Return what `API_VERSION` covers, by dotted name; parameters and fields each apart. Ops are TokenSpeed's own."""
    from tokenspeed_core.kernels.installed import installed_ops
    from tokenspeed_core.plugins import hookspecs
    from tokenspeed_core.plugins.catalog import Catalog
    from tokenspeed_core.plugins.kinds import KINDS
    from tokenspeed_core.plugins.selection import Selection

    found = named(CORE)
    for module, name in (("distribution", "DistributionConformance"), ("kernel", "KernelConformance"),
                         ("model", "ModelConformance"), ("parser", "ParserConformance"),
                         ("policy", "PolicyConformance")):
        value = getattr(import_module(f"tokenspeed_core.testing.{module}"), name)
        found |= dict(described(f"tokenspeed_core.testing.{module}.{name}", value))
    for name, value in vars(hookspecs).items():
        if hasattr(value, "tokenspeed_spec"):
            found |= dict(described(f"hook {name}", value))
    for op in installed_ops(Catalog.discover(Selection(frozenset()))).values():
        for field in ("family", "signature", "axes", "mutates", "rows", "parts", "errors"):
            found[f"op {op.name}.{field}"] = str(getattr(op, field))
    return {**found, **{f"kind {kind}": f"api {each.api}" for kind, each in KINDS.items() if each.is_used}}


def layers() -> Signatures:
    """Return what `LAYERS_API` covers."""
    return {name: text for name, text in named("tokenspeed_models.layers").items() if "LAYERS_API" not in name}


def surfaces() -> Mapping[str, tuple[str, Callable[[], Signatures]]]:
    """Return the version that the code states for each surface, and what reads its signatures."""
    from tokenspeed_core.api import API_VERSION
    from tokenspeed_models.layers import LAYERS_API

    return {CORE: (API_VERSION, core), "tokenspeed_models.layers": (str(LAYERS_API), layers)}


def named(module: str) -> Signatures:
    """Return the signatures of the names that a module lists."""
    loaded = import_module(module)
    return {
        key: text for name in loaded.__all__ if name != "API_VERSION"
        for key, text in described(f"{module}.{name}", getattr(loaded, name))
    }


def described(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield (dotted name, text) for a value: its fields, methods and parameters, or the value itself."""
    if inspect.isclass(value):
        yield name, f"class({', '.join(base.__name__ for base in value.__bases__)})"
        fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        for field in fields:
            has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
            yield f"{name}.{field.name}", f"{field.type}{' = ...' if has_default else ''}"
        for key, each in vars(value).items():
            is_public = not key.startswith("_") or (key == "__init__" and not fields) or key == "__call__"
            each = inspect.unwrap(each.__func__ if isinstance(each, classmethod | staticmethod) else each)
            if is_public and inspect.isfunction(each) and each.__name__ != "_no_init_or_replace_init":
                yield from described(f"{name}.{key}", each)
            elif is_public and isinstance(each, property):
                yield f"{name}.{key}", "property"
    elif inspect.isfunction(value):
        signature = inspect.signature(value)
        yield name, f"-> {signature.return_annotation}"
        for parameter in signature.parameters.values():
            yield f"{name}({parameter.name})", str(parameter)
    else:
        yield name, " ".join(f"{value!r}".split()) if isinstance(value, tuple | str | int) else type(value).__name__


def digest(signatures: Signatures) -> str:
    """Return a short hash, which belongs to one version for ever."""
    return hashlib.sha256(json.dumps(signatures, sort_keys=True).encode()).hexdigest()[:16]


def broken(before: Signatures, after: Signatures) -> list[str]:
    """Return what a plugin written for `before` may stumble over in `after`."""
    gone = [name for name, text in before.items() if after.get(name) != text]
    demands = [
        name for name, text in after.items()
        if name not in before and name.endswith(")") and "=" not in text and "*" not in text
        and name.partition("(")[0] in before
    ]
    return [*gone, *demands]


def misversioned(old: Mapping[str, Any], version: str, signatures: Signatures) -> str:
    """Return why these signatures cannot have this version beside what is recorded, "" where they can."""
    said = old.get("versions", {}).get(version)
    if said == digest(signatures):
        return ""
    changed = broken(old.get("signatures", {}), signatures)
    if said is not None:
        added = sorted(signatures.keys() - old["signatures"].keys())
        return f"version {version} is another contract; raise it for: {', '.join([*changed, *added])}"
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

    contracts = (contract(kind, number) for kind, each in KINDS.items() for number in range(1, each.api + 1))
    return {*core(), *contracts, *(f"flag {flag(name)}" for name in Config.model_fields)}


def untimely(
    recorded: Mapping[str, list[str]], rows: Mapping[str, list[str]], there: Collection[str], version: str
) -> list[str]:
    """Return what is wrong with the deprecations `rows` in a version of the core, beside those last recorded.

    `there` is what the core offers. What was announced holds: a thing stays for its two minors, and not for longer.
    """
    now, wrong = minor(version), []
    for old, (since, goes, replacement) in rows.items():
        if minor(goes) != (minor(since)[0], minor(since)[1] + 2):
            wrong.append(f"{old}: goes with {goes}, which is not two minors after {since}")
        elif now >= minor(goes):
            wrong.append(f"{old}: was to go with {goes}, and this is {version}; remove it and its row")
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
