"""`tokenspeed plugins new` writes whole packages, of kinds that are used, and overwrites nothing."""

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

from tokenspeed_core import __version__
from tokenspeed_core.cli import main


def test_a_family_names_the_one_minor_of_the_layers_that_it_was_made_for(tmp_path: Path) -> None:
    assert main(["plugins", "new", "model", "acme", "--path", str(tmp_path / "made")]) == 0
    project = tomllib.loads((tmp_path / "made" / "pyproject.toml").read_text())["project"]
    minor = ".".join(__version__.split(".")[:2])
    assert f"tokenspeed-models=={minor}.*" in project["dependencies"]


@pytest.mark.parametrize("kind", RECIPES)
def test_a_package_of_every_kind_is_whole_and_its_entry_point_exists(
    kind: str, tmp_path: Path
) -> None:
    folder = tmp_path / "made"
    assert main(["plugins", "new", kind, "acme", "--path", str(folder)]) == 0
    made = {path.name for path in folder.iterdir()}
    assert made == {
        ".github",
        "README.md",
        "pyproject.toml",
        "tests",
        f"acme_{kind}".replace("-", "_"),
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
    jobs = yaml.safe_load(workflow)["jobs"]
    distribution = f"acme-{kind}"
    assert {"run": f"tokenspeed plugins check {distribution}"} in jobs["tests"]["steps"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}, (
        "a trusted publisher has no password"
    )
    assert jobs["publish"]["needs"] == "tests"
    assert not [path for path in folder.rglob("*") if path.is_file() and "$" in path.read_text()]


def test_the_parts_of_a_name_are_the_vendor_and_the_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plugins", "new", "attention", "acme/flash-2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["folder"], facts["distribution"], facts["name"]) == (
        "acme-flash-2",
        "acme-flash-2",
        "acme/flash-2",
    )
    assert facts["then"][-1] == "tokenspeed serve --attention-backend acme/flash-2"
    assert (tmp_path / "acme-flash-2" / "acme_flash_2" / "kernel.py").is_file()


def test_a_package_is_written_only_for_kinds_that_this_core_uses(
    refusal: Callable[..., str],
) -> None:
    from tokenspeed_core.plugins.kinds import KINDS

    for kind in (
        "attention",
        "sampling",
        "model",
        "tool-parser",
        "reasoning-parser",
        "policy",
        "command",
    ):
        assert KINDS[RECIPES[kind].group].is_used
    assert "no such kind" in refusal("plugins", "new", "drafter", "acme")


def test_what_is_mistyped_is_refused_with_what_there_is(
    tmp_path: Path, refusal: Callable[..., str]
) -> None:
    (tmp_path / "mine").write_text("precious")
    assert "did you mean attention?" in refusal("plugins", "new", "atention", "acme")
    assert "NAME or VENDOR/NAME" in refusal("plugins", "new", "moe", "Acme Inc.")
    for name in ("123", "9x", "acme/9x", "-x", "x-"):
        assert "each a letter of a-z and then a-z, 0-9 and single '-' between them" in refusal(
            "plugins", "new", "moe", name if name[0] != "-" else f"acme/{name}"
        )
    assert "TokenSpeed's own" in refusal("plugins", "new", "moe", "tokenspeed/fast")
    assert "is there already" in refusal("plugins", "new", "moe", "acme", "--path", str(tmp_path))
    assert (tmp_path / "mine").read_text() == "precious"


def test_two_packages_are_not_given_one_distributions_name(
    refusal: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plugins", "new", "attention", "acme/fast"]) == 0
    capsys.readouterr()
    for folder in ("other", "acme-fast", f"{tmp_path}/deeper"):
        said = refusal("plugins", "new", "moe", "acme/fast", "--path", folder)
        assert said.startswith(
            "acme-fast is a package acme-fast already, and pip keeps one of a name; take another: "
        )
        assert said.endswith("`tokenspeed plugins new moe acme/fast-moe`")
        assert folder == "acme-fast" or not (tmp_path / folder).exists()
    assert main(["plugins", "new", "moe", "acme/fast-moe"]) == 0
    assert main(["plugins", "new", "moe", "acme"]) == 0
    capsys.readouterr()
    assert refusal("plugins", "new", "moe", "acme").endswith(
        "`tokenspeed plugins new moe acme/moe-2`"
    )


def test_a_folder_that_cannot_be_written_is_refused_in_one_line(
    refusal: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    said = refusal(
        "plugins", "new", "attention", "acme", "--path", str(tmp_path / "file" / "below")
    )
    assert (
        said
        == f"{tmp_path}/file/below cannot be written: Not a directory; name another folder with --path"
    )
    assert "File name too long" in refusal("plugins", "new", "policy", "a" * 300)


def test_a_name_that_would_hide_an_installed_module_is_refused(refusal: Callable[..., str]) -> None:
    said = refusal("plugins", "new", "attention", "typing/extensions")
    assert said.startswith("a module typing_extensions is there already, ")
    assert said.endswith("take another name, or `pip uninstall typing-extensions` first")


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3-moe", "mistral"])
def test_the_name_of_a_family_that_is_installed_is_refused_with_one_that_is_free(
    name: str, refusal: Callable[..., str], tmp_path: Path
) -> None:
    pytest.importorskip("tokenspeed_models")
    pytest.importorskip("tokenspeed_models_mistral")
    said = refusal("plugins", "new", "model", name, "--path", str(tmp_path / "made"))
    whose = "tokenspeed-models-mistral" if name == "mistral" else "tokenspeed-models"
    assert (
        f"ForCausalLM is that of {whose} 0.1.0 already, and a name that is claimed twice stops every start"
        in said
    )
    assert said.endswith(f"`tokenspeed plugins new model VENDOR/{name}`")
    assert not (tmp_path / "made").exists()
    assert main(["plugins", "new", "model", f"acme/{name}", "--path", str(tmp_path / "made")]) == 0


@pytest.mark.parametrize("kind", RECIPES)
def test_a_name_that_an_installed_distribution_has_is_refused_for_every_kind(
    kind: str, refusal: Callable[..., str], tmp_path: Path, site: Site
) -> None:
    group, name = RECIPES[kind].group, fields_of(kind, "acme/own")["name"]
    site.install("other", {f"{group} {name}": "other:X [api1]"})
    said = refusal("plugins", "new", kind, "acme/own", "--path", str(tmp_path / "made"))
    assert said.startswith(f"{group} {name} is that of other 1.0 already, ")
    assert not (tmp_path / "made").exists()
