"""The repository: README, generated pages, dependencies and names in the core."""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.tree

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = sorted(
    path.parent
    for path in [*ROOT.glob("tokenspeed_*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml")]
)
MODULE_OF = {  # the distributions that are imported by another name
    "huggingface-hub": "huggingface_hub",
    "opentelemetry-api": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
    "opentelemetry-sdk": "opentelemetry",
    "pyyaml": "yaml",
    "pyzmq": "zmq",
}
FOREIGN = (  # families, kernel libraries, vendors' kernels and parsers: plugins may name them, the core not
    "llama",
    "qwen",
    "mistral",
    "mixtral",
    "deepseek",
    "kimi",
    "gemma",
    "phi3",
    "glm",
    "minimax",
    "gpt_oss",
    "flashinfer",
    "flash_attn",
    "flash_mla",
    "flashmla",
    "deepgemm",
    "deep_gemm",
    "cutlass",
    "cublas",
    "trtllm",
    "fa3",
    "fa4",
    "xgrammar",
    "outlines",
    "llguidance",
    "hermes",
    "pythonic",
)


def python_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*.py")):
        if not {"tests", "build", "dist"} & set(path.relative_to(folder).parts):
            yield path


def section(title: str) -> str:
    text = (ROOT / "README.md").read_text()
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def folders(parent: Path) -> set[str]:
    """Return the folders that hold anything of ours."""
    made = {"__pycache__", "build", "dist", "wheelhouse"}
    return {
        f"{path.name}/"
        for path in parent.iterdir()
        if path.is_dir()
        and not path.name.startswith(".")
        and path.name not in made
        and any(each.is_file() and each.suffix != ".pyc" for each in path.rglob("*"))
    }


def test_readme_map_matches_the_tree() -> None:
    outer, _, inner = section("Map").partition("Inside `tokenspeed_core/`:")
    assert set(re.findall(r"^\| `([\w/]+)` \|", outer, re.MULTILINE)) == folders(ROOT)
    assert set(re.findall(r"^\| `([\w/]+)` \|", inner, re.MULTILINE)) == folders(
        ROOT / "tokenspeed_core"
    )


@pytest.mark.parametrize("title", ["Run", "Test"])
def test_readme_commands_are_one_line(title: str) -> None:
    (block,) = re.findall(r"^```bash\n(.*?)^```$", section(title), re.MULTILINE | re.DOTALL)
    assert block.count("\n") == 1
    subprocess.run(["bash", "-n", "-c", block], check=True)


def test_ci_runs_the_test_line() -> None:
    (line,) = re.findall(r"^```bash\n(.*)\n```$", section("Test"), re.MULTILINE)
    script = (ROOT / ".ci" / "run").read_text().replace('cd "$(dirname "$0")/.."', f"cd {ROOT}")
    printed = script.replace('exec bash -c "$line"', 'printf %s "$line"')
    assert printed != script
    assert (
        subprocess.run(["sh", "-c", printed], capture_output=True, text=True, check=True).stdout
        == line
    )


def test_parameter_page_is_current() -> None:
    made = runpy.run_path(str(ROOT / "tools" / "docs" / "make_parameters.py"))
    hint = "run python tools/docs/make_parameters.py"
    assert (ROOT / "docs" / "parameters.md").read_text() == made["page"](), hint
    keywords = ROOT / "tokenspeed_core" / "config" / "keywords.py"
    assert keywords.read_text() == made["keywords"](), hint


def test_core_names_no_model_or_vendor() -> None:
    pattern = re.compile(rf"(?<![a-z])({'|'.join(FOREIGN)})(?![a-z])", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in python_files(ROOT / "tokenspeed_core")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


def imports_of(path: Path) -> Iterator[str]:
    """Yield the top-level modules that a file imports, those for the type checker alone left out."""
    tree = ast.parse(path.read_text())
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for each in node.body
        for inner in ast.walk(each)
    }
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("folder", DISTRIBUTIONS, ids=lambda folder: folder.name)
def test_declared_dependencies_are_imported(folder: Path) -> None:
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {})
    lines = [*project["dependencies"], *(line for extra in extras.values() for line in extra)]
    names = [re.split(r"[^\w.-]", line)[0].lower().replace("_", "-") for line in lines]
    declared = {MODULE_OF.get(name, name.replace("-", "_")) for name in [*names, project["name"]]}
    if folder.name == "tokenspeed_core":
        declared |= {"torch", "annotated_types", "pydantic_core"}  # the runner's; pydantic's
    used = {module for path in python_files(folder) for module in imports_of(path)}
    assert used - set(sys.stdlib_module_names) - declared == set()
    required = [
        re.split(r"[^\w.-]", line)[0].lower().replace("_", "-") for line in project["dependencies"]
    ]
    third_party = {
        MODULE_OF.get(name, name.replace("-", "_")) for name in required if "tokenspeed" not in name
    }
    assert third_party - used == set(), "declared and never imported"


def test_no_dependency_on_another_project() -> None:
    for folder in DISTRIBUTIONS:
        text = (folder / "pyproject.toml").read_text()
        assert not re.search(r'"tokenspeed(-kernel)?[\[<>=~!; ]*"', text), folder


def test_plugins_declare_a_core_range() -> None:
    core = tomllib.loads((ROOT / "tokenspeed_core/pyproject.toml").read_text())["project"]
    for folder in DISTRIBUTIONS:
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        wanted = [
            Requirement(line)
            for line in project["dependencies"]
            if line.startswith("tokenspeed-core")
        ]
        if project["name"] != "tokenspeed-core":
            assert [
                bool(each.specifier) and core["version"] in each.specifier for each in wanted
            ] == [True], folder


def test_entry_points_exist() -> None:
    for folder in DISTRIBUTIONS:
        groups = tomllib.loads((folder / "pyproject.toml").read_text())["project"].get(
            "entry-points", {}
        )
        for points in groups.values():
            for value in points.values():
                module, attribute = re.fullmatch(r"([\w.]+)(?::(\w+))? \[api\d+\]", value).groups()  # type: ignore[union-attr]
                parts = module.split(".")
                root = folder if folder.name == parts[0] else folder / parts[0]
                path = root.joinpath(*parts[1:])
                source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
                text = source.read_text()
                assert attribute is None or re.search(
                    rf"^(def |class )?{attribute}\b", text, re.MULTILINE
                ), value


def test_default_distributions_are_in_this_repository() -> None:
    from tokenspeed_core.plugins.selection import DEFAULTS

    names = {
        tomllib.loads((folder / "pyproject.toml").read_text())["project"]["name"]
        for folder in DISTRIBUTIONS
    }
    assert names > DEFAULTS


def test_default_commands_are_entry_points() -> None:
    from tokenspeed_core.plugins.kinds import COMMANDS

    declared = {}
    for folder in DISTRIBUTIONS:
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        commands = project.get("entry-points", {}).get("tokenspeed.commands", {})
        declared.update(dict.fromkeys(commands, project["name"]))
    assert declared == COMMANDS


def vendors() -> Iterator[tuple[Path, Path, list[str]]]:
    """Yield a plugin's folder, its tests of a vendor's library, and the versions that these are run with."""
    for folder in DISTRIBUTIONS:
        settings = tomllib.loads((folder / "pyproject.toml").read_text()).get("tool", {})
        for each in settings.get("tokenspeed", {}).get("vendors", []):
            yield folder, folder / each["tests"], each["libraries"]


def test_vendor_versions_are_the_declared_bounds() -> None:
    for plugin, _, libraries in vendors():
        extras = tomllib.loads((plugin / "pyproject.toml").read_text())["project"][
            "optional-dependencies"
        ]
        asked = (Requirement(line) for lines in extras.values() for line in lines)
        (taken,) = (
            each
            for each in asked
            if all(library.startswith(f"{each.name}==") for library in libraries)
        )
        versions = [library.removeprefix(f"{taken.name}==") for library in libraries]
        bounds = {each.operator: each.version for each in taken.specifier}
        assert bounds.keys() == {">=", "<"}, f"{plugin.name} takes {taken}"
        assert bounds[">="] == versions[0]
        assert all(taken.specifier.contains(version) for version in versions)
        assert all(version in (plugin / "README.md").read_text() for version in versions)


def test_kept_signatures_match_the_tested_versions() -> None:
    for _, tests, libraries in vendors():
        record = (tests.parent if tests.suffix == ".py" else tests) / "signatures.json"
        found = json.loads(record.read_text())
        assert list(found["libraries"]) == libraries, f"nox -s vendors renews {record}"
        assert all(set(found["read"]) == set(each) for each in found["libraries"].values())


def test_requirements_list_every_distribution() -> None:
    listed = set(re.findall(r"^-e \./(.*)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    assert listed == {str(folder.relative_to(ROOT)) for folder in DISTRIBUTIONS}


def test_dynamic_imports_are_in_one_place() -> None:
    core = [path for path in python_files(ROOT / "tokenspeed_core") if "testing" not in path.parts]
    ways = re.compile(
        r"\b(import_module|__import__|exec_module|spec_from_file_location|EntryPoint\.load)\("
    )
    found = {
        str(path.relative_to(ROOT / "tokenspeed_core"))
        for path in core
        if ways.search(path.read_text())
    }
    assert found == {"targets.py", "__init__.py"}, (
        "the latter imports the names that tokenspeed_core lists"
    )
