"""Check the types of every distribution, the tools and the benchmarks with mypy, in one process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Run mypy; return its exit status."""
    core = sorted(path.parent for path in ROOT.glob("tokenspeed_*/pyproject.toml"))
    plugins = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
    packages = [*core, *(folder / folder.name.replace("-", "_") for folder in plugins)]
    scripts = [ROOT / "tools", ROOT / "benchmarks"]
    # Scripts import their neighbors, packages import from their own folder.
    folders = {path.parent for folder in scripts for path in folder.rglob("*.py")}
    neighbors = sorted(path for path in folders if not (path / "__init__.py").exists())
    bases = dict.fromkeys([ROOT, *plugins, *neighbors])
    os.environ["MYPYPATH"] = os.pathsep.join(map(str, bases))
    targets = [str(path.relative_to(ROOT)) for path in [*packages, *scripts]]
    os.chdir(ROOT)
    os.execv(sys.executable, [sys.executable, "-m", "mypy", *targets, *sys.argv[1:]])


if __name__ == "__main__":
    main()
