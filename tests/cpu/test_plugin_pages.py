"""The pages for authors of plugins say what the code does now."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import tomllib
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from tokenspeed_core import api

pytestmark = pytest.mark.tree

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LAYERS = "tokenspeed_models.layers"
REQUIREMENTS = (DOCS / "plugin-requirements.md").read_text()
ROW = re.compile(r"^\| (S?\d+) \| (.+?) \| (met|partly|not|otherwise)\b(.*) \|$", re.MULTILINE)
TEST = re.compile(r"`((?:tests|plugins)/[\w/.-]+\.py)::(\w+)`")


def maker(name: str) -> ModuleType:
    """Return a script of docs/, which is in no package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def functions_of(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def test_the_page_of_kinds_is_current() -> None:
    assert (DOCS / "plugins.md").read_text() == maker("make_plugins").page(), (
        "run python tools/docs/make_plugins.py"
    )


def test_the_directory_has_every_plugin_of_this_tree_in_its_version_and_none_that_fails() -> None:
    page = (DOCS / "plugin-directory.md").read_text()
    assert f"(api {api.API_VERSION})" in page, "run python docs/make_directory.py"
    rows = re.findall(
        r"^\| \[([\w-]+)\]\((.+?)\) ([\d.]+): .*? \| .*? \| (\d+) \| (\d+) \|", page, re.MULTILINE
    )
    paths = [*ROOT.glob("tokenspeed_*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml")]
    wanted = {
        path.parent.name.replace("_", "-"): path.parent
        for path in paths
        if "core" not in path.parent.name
    }
    linked = {name: DOCS.joinpath(link).resolve() for name, link, *_ in rows}
    assert linked == wanted, "run python docs/make_directory.py"
    for name, _, version, asked, failed in rows:
        said = tomllib.loads((wanted[name] / "pyproject.toml").read_text())["project"]["version"]
        assert (version, int(failed)) == (said, 0) and int(asked) >= 7


def public_names() -> list[str]:
    """Return every name that a stranger may import: the api's, the core's own, the commands', layers' and the kit's."""
    contract = maker("make_contract")
    modules = (
        "tokenspeed_core.api",
        "tokenspeed_core",
        LAYERS,
        *contract.modules("tokenspeed_core.commands"),
    )
    listed = [name for module in modules for name in importlib.import_module(module).__all__]
    whole = (*contract.modules("tokenspeed_testing"), *contract.LAYERS_BESIDE)
    files = [Path(importlib.import_module(name).__file__ or "") for name in whole]
    versions = {"API_VERSION", "COMMANDS_API", "LAYERS_API"}
    return sorted(
        {*listed, *(name for path in files for name in contract.defined(path))} - versions
    )


@pytest.mark.parametrize("name", public_names())
def test_the_page_of_kinds_tells_of_every_name_that_a_stranger_may_import(name: str) -> None:
    told = re.compile(rf"^### `([\w.]+\.)?{name}`$|\*\*`{name}[`(]", re.MULTILINE)
    assert told.search((DOCS / "plugins.md").read_text()), (
        f"docs/make_plugins.py says nothing of {name}"
    )


def test_the_page_of_kinds_says_what_its_authors_implement_and_are_given() -> None:
    page = (DOCS / "plugins.md").read_text()
    for name, member in {
        "AttentionKernel": "prepare(self, step: AttentionStep) -> None",
        "AttentionFactory": "__call__(self, problem",
        "BuildContext": "quantization: Quantization | None",
        "Model": "logits(self, hidden",
        "Checkpoint": "path: str",
        "Decision": "victims: I32`: indices into the view",
        "WeightReader": "__call__(self, path: str",
    }.items():
        section = page.split(f"\n### `{name}`\n")[1].partition("\n#")[0]
        assert f"\n- `{member}" in section, name
    assert not re.search(r"tokenspeed_core\.(kernels|runner|engine|scheduler|kv|models)\b", page), (
        "nothing internal"
    )


def test_every_link_within_the_page_of_kinds_leads_to_a_heading() -> None:
    page = (DOCS / "plugins.md").read_text()
    slug = maker("make_plugins").slug
    headings = {slug(line) for line in re.findall(r"^#+ (.+)$", page, re.MULTILINE)}
    links = set(re.findall(r"\]\(#([^)]+)\)", page))
    assert len(links) > 10
    assert links - headings == set()


def test_every_requirement_has_a_row_and_every_met_one_a_test() -> None:
    rows = ROW.findall(REQUIREMENTS)
    assert [number for number, *_ in rows] == [
        *map(str, range(1, 31)),
        *(f"S{n}" for n in range(1, 6)),
    ]
    bare = [
        number for number, _, verdict, text in rows if verdict == "met" and not TEST.search(text)
    ]
    assert bare == []
    silent = [number for number, _, verdict, text in rows if verdict != "met" and len(text) < 20]
    assert silent == [], "a row that is not met says why"


@pytest.mark.parametrize(
    ("path", "name"), sorted(set(TEST.findall(REQUIREMENTS))), ids=lambda part: part
)
def test_every_test_that_the_requirements_name_exists(path: str, name: str) -> None:
    assert name in functions_of(path)


def test_the_pages_say_plainly_that_nothing_is_sandboxed() -> None:
    assert "No sandbox" in (DOCS / "plugins.md").read_text()
    assert "**A plugin is not sandboxed.**" in (DOCS / "plugins-trust.md").read_text()
