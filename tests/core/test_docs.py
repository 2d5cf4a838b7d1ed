"""The documentation builds without broken links, and its programs run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tokenspeed_core.api.sampling import SamplingParams

pytestmark = pytest.mark.tree

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")
FOLDERS = ("benchmarks", "docs", "examples", "plugins", "tests", "tools")


def test_site_builds_without_warnings(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr


def test_links_of_repository_pages_exist() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("examples/*.md"), *ROOT.glob("plugins/*/README.md")]
    missing = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in pages
        for link in LINK.findall(page.read_text(encoding="utf-8"))
        if not (page.parent / link).exists()
    ]
    assert missing == []


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if page not in navigation and "adr/0" not in page} == set()


def test_chart_is_current() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import make_chart; print(make_chart.chart(), end='')"],
        cwd=ROOT / "tools" / "docs",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == (ROOT / "docs/assets/benchmarks.svg").read_text(encoding="utf-8")


def test_python_page_lists_every_sampling_parameter() -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    table = page.partition("## Sampling parameters")[2]
    missing = [name for name in SamplingParams.model_fields if f"`{name}" not in table]
    assert missing == []


def test_tables_begin_with_a_header() -> None:
    rule = re.compile(r"\|[-:| ]+\|")
    broken = []
    for page in (*ROOT.glob("*.md"), *(p for f in FOLDERS for p in (ROOT / f).rglob("*.md"))):
        fence = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
        lines = ["", *fence.sub("", page.read_text(encoding="utf-8")).splitlines(), ""]
        for before, line, after in zip(lines, lines[1:], lines[2:], strict=False):
            if line.startswith("|") and not before.startswith("|") and not rule.fullmatch(after):
                broken.append(f"{page.relative_to(ROOT)}: {line}")
    assert broken == []


def test_testing_page_lists_every_session() -> None:
    source = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    page = (ROOT / "docs/development/testing.md").read_text(encoding="utf-8")
    sessions = re.findall(r"^@nox\.session\n(?:@.*\n)*def (\w+)", source, re.MULTILINE)
    assert "tests" in sessions
    assert [name for name in sessions if f"| `{name}` |" not in page] == []
