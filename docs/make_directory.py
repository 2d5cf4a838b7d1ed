"""Write docs/plugin-directory.md: the plugins of this tree, and what `tokenspeed plugins check` says of each here.

It asks each in turn, which takes minutes. On a machine with a GPU and the vendors' libraries more is run than on one
without; the page says what it was made on.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import metadata, version
from pathlib import Path
from typing import Any

from tokenspeed_plugin_tools.origins import PUBLISHED

from tokenspeed_core.api import API_VERSION
from tokenspeed_core.plugins import Catalog, Entry, Selection

PAGE = Path(__file__).with_name("plugin-directory.md")
TREE = Path(__file__).parents[1]
HEAD = """# The plugins of this tree, and their verdicts

Made by `python docs/make_directory.py`, which asks `tokenspeed plugins check` about each, on {made}.
These are results of that day and not of every night. Strangers' plugins are not among them: no list of these is kept.

*asked* counts questions of the conformance kit, *skipped* those that do not apply or could not be run there. What could
not be run there, for want of a device or of a vendor's library, is counted in cells (combinations of declared values);
of a family that brings no example to build it from, it is its questions.

| distribution | brings | asked | failed | skipped | not run |
|---|---|---|---|---|---|
"""


def distributions() -> dict[str, tuple[Entry, ...]]:
    """Return the entries of each plugin of this tree, by the distribution's name."""
    found = Catalog.discover(Selection(), check=False).all()
    names = sorted(PUBLISHED - {"tokenspeed-core"})
    return {name: tuple(entry for entry in found if entry.distribution == name) for name in names}


def described(name: str, entries: Iterable[Entry]) -> str:
    """Return the first two cells of a row: what is read from metadata alone."""
    kinds: dict[str, list[str]] = {}
    for entry in entries:
        kinds.setdefault(entry.kind, []).append(entry.name)
    brings = "; ".join(f"{kind}: {', '.join(each)}" for kind, each in kinds.items())
    (folder,) = (
        path.parent
        for path in (*TREE.glob("*/pyproject.toml"), *TREE.glob("plugins/*/pyproject.toml"))
        if path.parent.name.replace("_", "-") == name
    )
    link = f"../{folder.relative_to(TREE)}"
    return f"| [{name}]({link}) {version(name)}: {metadata(name).json['summary']} | {brings} |"


def row(name: str, entries: Iterable[Entry], report: dict[str, Any]) -> str:
    """Return a distribution's line."""
    told = [verdict["verdict"] for verdict in report["verdicts"]]
    left: dict[str, int] = {}
    for each in report["not_run"]:
        left[each["needs"]] = left.get(each["needs"], 0) + each["num_cells"]
    not_run = "; ".join(f"{num}: {needs}" for needs, num in left.items())
    failed = len(told) - told.count("ok") - told.count("skipped")
    return f"{described(name, entries)} {len(told)} | {failed} | {told.count('skipped')} | {not_run or 'nothing'} |"


def checked(name: str) -> dict[str, Any]:
    """Return what the command says of a distribution."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "tokenspeed_core.cli",
        "plugins",
        "check",
        name,
        "--json",
    ]
    report: dict[str, Any] = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=False).stdout
    )
    return report


def made() -> str:
    """Say when and on what the page is made."""
    import torch

    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"no GPU, {platform.machine()}"
    )
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, tokenspeed-core {version('tokenspeed-core')} (api {API_VERSION}), "
        f"Python {platform.python_version()}, torch {torch.__version__}, {device}"
    )


def main() -> None:
    """Ask each, telling which, and write the page."""
    rows = []
    for name, entries in distributions().items():
        print(name, flush=True)
        rows.append(row(name, entries, checked(name)))
    PAGE.write_text(HEAD.format(made=made()) + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
