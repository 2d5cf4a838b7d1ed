"""The tutorial's lines, executed word for word by bash in an environment of its own, without a network."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.tree

PAGE = Path(__file__).parents[2] / "docs" / "tutorial-backend.md"
PROGRAMS = {"pip": "pip", "pytest": "pytest", "tokenspeed": "tokenspeed_core.cli"}


def environment(folder: Path) -> dict[str, str]:
    """Make a virtual environment that sees what runs these tests; its `pip` asks no index and isolates no build."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # an import line, so that the .pth files of editable installs there are read as well
    (site / "shared.pth").write_text(f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n")
    for name, module in PROGRAMS.items():
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec "{folder}/bin/python" -P -m {module} "$@"\n')
        program.chmod(0o755)
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("TOKENSPEED_", "PYTHON"))}
    return {
        **ours, "PATH": f"{folder}/bin:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def test_every_line_of_the_tutorial_works_in_its_order(tmp_path: Path) -> None:
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    (tmp_path / "work").mkdir()
    script = "set -eo pipefail\ntrap 'kill $(jobs -p) 2> /dev/null || true' EXIT\n" + "".join(blocks)
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path / "work", env=environment(tmp_path / "environment"), timeout=120,
        capture_output=True, text=True, check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "acme-attention: passed" in said
    assert "acme-attention: FAILED" in said, "the broken kernel was not found"
    answer = json.loads((tmp_path / "work" / "acme-attention" / "answer.json").read_text())
    assert "68" in answer["choices"][0]["message"]["content"]


def test_the_package_is_not_left_behind() -> None:
    words = [sys.executable, "-P", "-c", "import acme_attention"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError" in done.stderr
