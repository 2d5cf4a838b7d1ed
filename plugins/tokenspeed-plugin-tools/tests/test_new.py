"""`tokenspeed plugins new` writes complete packages and overwrites nothing."""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from fake_site import Site
from tokenspeed_plugin_tools.new import RECIPES, fields_of

from tokenspeed_core.cli import main

Refusal = Callable[..., str]


@pytest.mark.parametrize("kind", RECIPES)
def test_package_is_complete(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    assert main(["plugins", "new", kind, "acme", "--path", str(folder)]) == 0
    package = f"acme_{kind}".replace("-", "_")
    assert {path.name for path in folder.iterdir()} == {
        ".github",
        "README.md",
        "pyproject.toml",
        "tests",
        package,
    }
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    ((group, points),) = project["entry-points"].items()
    (value,) = points.values()
    assert group == f"tokenspeed.{RECIPES[kind].group}"
    module, attribute = value.removesuffix(" [api1]").split(":")
    assert attribute in (folder / module / "__init__.py").read_text()
    assert any(
        line.startswith("tokenspeed-core") and ">=" in line for line in project["dependencies"]
    )
    for path in folder.rglob("*.py"):
        ast.parse(path.read_text())
    workflow = (folder / ".github" / "workflows" / "tests.yml").read_text()
    steps = yaml.safe_load(workflow)["jobs"]["tests"]["steps"]
    assert {"run": f"tokenspeed plugins check acme-{kind}"} in steps
    assert not [path for path in folder.rglob("*") if path.is_file() and "$" in path.read_text()]


def test_name_gives_vendor_and_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plugins", "new", "attention", "acme/flash-2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["folder"] == facts["distribution"] == "acme-flash-2"
    assert facts["name"] == "acme/flash-2"
    assert facts["then"][-1] == "tokenspeed serve --attention-backend acme/flash-2"
    assert (tmp_path / "acme-flash-2" / "acme_flash_2" / "kernel.py").is_file()


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("acme", "AcmeForCausalLM"),
        ("acme/my-model2", "MyModel2ForCausalLM"),
        ("acme/model", "AcmeForCausalLM"),
    ],
)
def test_architecture_of_a_model_has_no_vendor(
    name: str, architecture: str, tmp_path: Path
) -> None:
    folder = tmp_path / "made"
    assert main(["plugins", "new", "model", name, "--path", str(folder)]) == 0
    (model,) = folder.glob("*/model.py")
    assert f"class {architecture}(CausalLM):" in model.read_text()
    config = json.loads((model.parent / "example" / "config.json").read_text())
    assert config["architectures"] == [architecture]


@pytest.mark.parametrize(
    "name", ["Acme Inc.", "123", "acme/9x", "acme/-x", "x-", "tokenspeed/fast"]
)
def test_invalid_name_is_refused(name: str, refusal: Refusal) -> None:
    assert "name" in refusal("plugins", "new", "moe", name)


def test_existing_files_stay(tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "mine").write_text("precious")
    assert "--path" in refusal("plugins", "new", "moe", "acme", "--path", str(tmp_path))
    below = str(tmp_path / "mine" / "below")
    assert "--path" in refusal("plugins", "new", "moe", "acme", "--path", below)
    assert (tmp_path / "mine").read_text() == "precious"


def test_installed_module_is_not_hidden(refusal: Refusal) -> None:
    assert "typing_extensions" in refusal("plugins", "new", "attention", "typing/extensions")


@pytest.mark.parametrize("kind", RECIPES)
def test_existing_plugin_name_is_rejected(
    kind: str, refusal: Refusal, tmp_path: Path, site: Site
) -> None:
    group = RECIPES[kind].group
    name = fields_of(kind, "acme/own")["name"]
    site.install("other", {f"{group} {name}": "other:X [api1]"})
    message = refusal("plugins", "new", kind, "acme/own", "--path", str(tmp_path / "made"))
    assert "other 1.0" in message
    assert not (tmp_path / "made").exists()
