"""Runs the commands of docs/tutorial-backend.md in a fresh virtual environment, without a network."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

# The limits end a hang. A busy machine needs several times the minute of an idle one.
pytestmark = [pytest.mark.slow, pytest.mark.tree, pytest.mark.timeout(1200)]
COMMANDS_TIMEOUT = 1100  # seconds

PAGE = Path(__file__).parents[2] / "docs" / "tutorial-backend.md"
PROGRAMS = {"pip": "pip", "pytest": "pytest", "tokenspeed": "tokenspeed_core.cli"}


def environment(folder: Path) -> dict[str, str]:
    """Create a virtual environment that sees the packages of this one; its pip uses no index."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # An import line, so that the .pth files of editable installs there are read as well.
    (site / "shared.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n"
    )
    for name, module in PROGRAMS.items():
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec "{folder}/bin/python" -P -m {module} "$@"\n')
        program.chmod(0o755)
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TOKENSPEED_", "PYTHON"))
    }
    return {
        **inherited,
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def free_port() -> str:
    """Return a port that nothing uses now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


@pytest.mark.release
def test_every_command_of_the_tutorial_works(tmp_path: Path) -> None:
    blocks = re.findall(
        r"^```bash\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert len(blocks) == 6
    work = tmp_path / "work"
    work.mkdir()
    script = "set -eo pipefail\ntrap 'kill $(jobs -p) 2> /dev/null || true' EXIT\n"
    commands = "".join(blocks).replace("8765", free_port())
    done = subprocess.run(
        ["bash", "-c", script + commands],
        cwd=work,
        env=environment(tmp_path / "environment"),
        timeout=COMMANDS_TIMEOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "acme-attention: passed" in output
    assert "acme-attention: FAILED" in output, "the broken kernel was not found"
    answer = json.loads((work / "acme-attention" / "answer.json").read_text())
    assert "68" in answer["choices"][0]["message"]["content"]
