"""The documentation builds without broken links, and its programs run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from tokenspeed_server.settings import ServerConfig

from tokenspeed_core.api.sampling import SamplingParams
from tokenspeed_core.commands.settings import ModelArgument, configure, with_settings

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


def test_models_page_lists_every_architecture() -> None:
    table = (ROOT / "docs/models.md").read_text(encoding="utf-8").partition("\n### Recipes")[0]
    rows = [re.findall(r"[\w-]+", line) for line in table.splitlines() if line.startswith("| `")]
    missing = []
    for file in (ROOT / "tokenspeed_models/pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        for name in project.get("entry-points", {}).get("tokenspeed.models", {}):
            if name != "*" and not any(name in row and row[-1] == project["name"] for row in rows):
                missing.append((name, project["name"]))
    assert len(rows) > 10
    assert missing == []


def test_recipes_of_models_parse() -> None:
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    table = page.partition("\n### Recipes")[2].partition("\n### ")[0]
    recipes = re.findall(r"`tokenspeed serve *([^`]*)`", table)
    models = []

    def run(model: ModelArgument = None, *, flags: dict[str, Any]) -> int:
        models.append(configure(ServerConfig, model, flags, None).model)
        return 0

    app = typer.Typer(add_completion=False)
    app.command()(with_settings(ServerConfig, run))
    serve = typer.main.get_command(app)
    for recipe in recipes:
        assert serve.main(shlex.split(recipe), "tokenspeed serve", standalone_mode=False) == 0
    assert len(models) == len(recipes) > 20


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
