"""Run the tutorial's commands as they stand, time each, and write the table at the end of docs/tutorial-backend.md.

`python docs/make_tutorial_times.py` takes a minute. The environment is a new one that sees what runs this script.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
from itertools import pairwise
from pathlib import Path

PAGE = Path(__file__).parent / "tutorial-backend.md"
TITLE = "## How long it takes\n"
PROGRAMS = {"pip": "pip", "pytest": "pytest", "tokenspeed": "tokenspeed_core.cli"}


def blocks() -> list[str]:
    """Return the page's blocks of commands."""
    return re.findall(
        r"^```bash\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def commands() -> list[str]:
    """Return the page's commands, one that stands on several lines as one."""
    return re.split(r"(?<!\\)\n", "".join(blocks()).rstrip("\n"))


def environment(folder: Path) -> dict[str, str]:
    """Make a virtual environment that sees what runs this; its `pip` asks no index and isolates no build."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # an import line, so that the .pth files of editable installs there are read as well
    (site / "shared.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n"
    )
    for name, module in PROGRAMS.items():
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec "{folder}/bin/python" -P -m {module} "$@"\n')
        program.chmod(0o755)
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TOKENSPEED_", "PYTHON"))
    }
    return {
        **ours,
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in a fresh environment, in `folder`/work; what it leaves running is ended."""
    (folder / "work").mkdir()
    head = "set -eo pipefail\ntrap 'kill $(jobs -p) 2> /dev/null || true' EXIT\n"
    return subprocess.run(
        ["bash", "-c", head + script],
        cwd=folder / "work",
        env=environment(folder / "environment"),
        timeout=280,
        capture_output=True,
        text=True,
        check=False,
    )


def timed(folder: Path) -> list[tuple[str, float]]:
    """Run every command of the page; return it with its seconds. Raises CalledProcessError."""
    marks = folder / "marks"
    mark = f"echo $EPOCHREALTIME >> {marks}\n"
    run(mark + "".join(f"{command}\n{mark}" for command in commands()), folder).check_returncode()
    times = [float(line) for line in marks.read_text().split()]
    return [
        (command, after - before)
        for command, (before, after) in zip(commands(), pairwise(times), strict=True)
    ]


def table(rows: list[tuple[str, float]]) -> str:
    """Return the section: a row for each command, its comments and line breaks left out."""
    lines = [f"| `{label(command)}` | {seconds:.2f} |" for command, seconds in rows]
    total = sum(seconds for _, seconds in rows)
    where = f"{os.cpu_count()} cores of {cpu()}, Python {platform.python_version()}, no GPU"
    return "\n".join(
        [
            TITLE,
            f"Every command above, once, on {where}, with all dependencies installed",
            f"(`python docs/make_tutorial_times.py`): {total:.0f} seconds from nothing to a wheel.",
            "",
            "| command | s |",
            "|---|---|",
            *lines,
            "",
        ]
    )


def label(command: str) -> str:
    """Return a command on one line, as a cell of a table holds it."""
    return " ".join(command.replace("\\\n", " ").replace("|", "\\|").split())


def cpu() -> str:
    """Return the processor's name."""
    found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.machine()


if __name__ == "__main__":
    text, _, _ = PAGE.read_text(encoding="utf-8").partition(TITLE)
    with tempfile.TemporaryDirectory() as name:
        PAGE.write_text(f"{text.rstrip()}\n\n{table(timed(Path(name)))}", encoding="utf-8")
