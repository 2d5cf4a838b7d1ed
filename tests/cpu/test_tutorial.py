"""The tutorial's lines, executed word for word by bash in an environment of its own, without a network."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import make_tutorial_times as tutorial
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.tree]


def test_every_line_of_the_tutorial_works_in_its_order(tmp_path: Path) -> None:
    blocks = tutorial.blocks()
    assert len(blocks) == 6
    done = tutorial.run("".join(blocks), tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "acme-attention: passed" in said
    assert "acme-attention: FAILED" in said, "the broken kernel was not found"
    answer = json.loads((tmp_path / "work" / "acme-attention" / "answer.json").read_text())
    assert "68" in answer["choices"][0]["message"]["content"]


def test_the_times_are_those_of_the_commands_that_stand_there() -> None:
    _, _, section = tutorial.PAGE.read_text(encoding="utf-8").partition(tutorial.TITLE)
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert [row.rpartition(" | ")[0] for row in rows] == [
        f"| `{tutorial.label(c)}`" for c in tutorial.commands()
    ]


def test_the_package_is_not_left_behind() -> None:
    words = [sys.executable, "-P", "-c", "import acme_attention"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError" in done.stderr
