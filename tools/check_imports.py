"""Check import directions with import-linter. The rules are derived from the folders, without a list."""

from __future__ import annotations

import configparser
import os
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from importlinter.cli import lint_imports

ROOT = Path(__file__).parents[1]
CORE = "tokenspeed_core"
PUBLIC = {"api", "commands"}  # modules of the core that plugins may import
LEAVES = {"errors", "rules", "targets"}  # modules of the core that its contracts may import
TESTING = "tokenspeed_testing"  # any package may import it in modules that only tests load
USES_TORCH = {"worker"}  # modules of the core that may import torch


def manifests() -> dict[str, dict[str, Any]]:
    """Return the pyproject.toml of each of our packages."""
    paths = [*ROOT.glob("tokenspeed_*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml")]
    found = {path.parent.name.replace("-", "_"): tomllib.loads(path.read_text()) for path in paths}
    return dict(sorted(found.items()))


def declared(manifest: dict[str, Any]) -> set[str]:
    """Return the packages that a distribution requires."""
    lines = manifest["project"]["dependencies"]
    return {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in lines}


def uses_internals(manifest: dict[str, Any]) -> bool:
    """Say whether a plugin of ours is allowed to import all of the core."""
    settings = manifest.get("tool", {}).get("tokenspeed", {})
    return bool(settings.get("uses-core-internals", False))


def contracts() -> configparser.ConfigParser:
    """Return import-linter's configuration."""
    packages = manifests()
    restricted = {name for name, each in packages.items() if not uses_internals(each)} - {CORE}
    modules = {
        path.stem
        for path in (ROOT / CORE).iterdir()
        if path.suffix == ".py" or (path.is_dir() and any(path.glob("*.py")))
    } - {"__init__"}
    config = configparser.ConfigParser()

    def add(name: str, kind: str, **options: str | Iterable[str]) -> None:
        lines = {
            key: value if isinstance(value, str) else "\n".join(sorted(value))
            for key, value in options.items()
        }
        number = len(config.sections())
        config[f"importlinter:contract:{number}"] = {"name": name, "type": kind, **lines}

    config["importlinter"] = {
        "root_packages": "\n" + "\n".join(packages),
        "include_external_packages": "True",
        "exclude_type_checking_imports": "True",
    }
    for package, manifest in packages.items():
        add(
            f"{package} imports only the packages that it declares",
            "forbidden",
            source_modules=[package],
            forbidden_modules=packages.keys() - declared(manifest) - {package, TESTING},
            allow_indirect_imports="True",
        )
    add(
        f"Plugins import only the public modules of the core: {', '.join(sorted(PUBLIC))}",
        "forbidden",
        source_modules=restricted,
        forbidden_modules=[f"{CORE}.{name}" for name in modules - PUBLIC],
        allow_indirect_imports="True",
    )
    add(
        f"The core's contracts import nothing else of it than {', '.join(sorted(LEAVES))}",
        "forbidden",
        source_modules=[f"{CORE}.api", *(f"{CORE}.{name}" for name in LEAVES)],
        forbidden_modules=[f"{CORE}.{name}" for name in modules - LEAVES - {"api"}],
    )
    add(
        f"The core imports torch only in {', '.join(sorted(USES_TORCH))}",
        "forbidden",
        source_modules=[f"{CORE}.{name}" for name in modules - USES_TORCH],
        forbidden_modules=["torch"],
        allow_indirect_imports="True",
    )
    return config


def main() -> int:
    """Check the contracts; return the exit status."""
    os.chdir(ROOT)
    with tempfile.NamedTemporaryFile("w", suffix=".ini") as file:
        contracts().write(file)
        file.flush()
        return lint_imports(config_filename=file.name, no_logo=True)


if __name__ == "__main__":
    sys.exit(main())
