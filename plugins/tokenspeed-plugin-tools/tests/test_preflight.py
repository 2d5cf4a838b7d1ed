"""The check before a start: plugins to skip, and errors that end the start."""

from __future__ import annotations

import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from fake_site import Site
from packaging.tags import sys_tags
from tokenspeed_plugin_tools.lock import freeze
from tokenspeed_plugin_tools.lock_file import as_toml
from tokenspeed_plugin_tools.preflight import build_mismatch, check

from tokenspeed_core import TokenSpeedError
from tokenspeed_core.commands import Catalog, Selection, Status
from tokenspeed_core.errors import PluginError

HERE = str(next(sys_tags()))
ENTRY = {"policies acme/p": "acme_policy:run [api1]"}


def discover(monkeypatch: pytest.MonkeyPatch, **environ: str) -> Catalog:
    """Discover the installed plugins with these variables."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return Catalog.discover()


def install(site: Site) -> Path:
    return site.install("acme", ENTRY, files={"acme_policy.py": "run = print"})


def test_preflight_is_installed_and_reports_no_problem(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site)
    catalog = discover(monkeypatch)
    assert catalog.entries("preflight")
    assert catalog.get("policies", "acme/p").status is Status.OK
    assert check(catalog.all(), None).problems == {}


def test_working_directory_is_left_out(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site)
    monkeypatch.chdir(site.path)
    catalog = discover(monkeypatch)
    with pytest.raises(PluginError, match="working directory"):
        catalog.get("policies", "acme/p")
    with pytest.raises(PluginError, match="working directory"):
        discover(monkeypatch, TOKENSPEED_PLUGINS="acme")


def test_replaced_module_is_not_imported(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "acme_policy.py").write_text("run = print")
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    catalog = discover(monkeypatch)
    with pytest.raises(PluginError, match=r"other/acme_policy\.py"):
        catalog.get("policies", "acme/p")
    assert "acme_policy" not in sys.modules


@pytest.mark.parametrize(
    ("tags", "requires", "named"),
    [
        (("cp27-cp27m-win32",), "", "cp27-cp27m-win32"),
        ((HERE,), "packaging<1", "packaging<1"),
        ((HERE, "cp27-cp27m-win32"), "packaging>=1", ""),
        ((HERE,), "packaging<1; python_version < '3'", ""),
        ((HERE,), "packaging<1; extra == 'more'", ""),
        ((HERE,), "tokenspeed-no-such-thing>=1", ""),
    ],
)
def test_compiled_code_of_another_build_is_left_out(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
    tags: tuple[str, ...],
    requires: str,
    named: str,
) -> None:
    info = site.install("acme", ENTRY, requires=requires, files={"acme_policy.py": "run = print"})
    lines = ["Root-Is-Purelib: false", *(f"Tag: {tag}" for tag in tags)]
    (info / "WHEEL").write_text("\n".join(lines))
    (distribution,) = distributions(name="acme", path=[str(site.path)])
    assert named in build_mismatch(distribution)
    assert bool(build_mismatch(distribution)) == bool(named)
    catalog = discover(monkeypatch)
    assert catalog.is_installed("policies", "acme/p")
    assert bool([e for e in catalog.entries("policies") if e.name == "acme/p"]) != bool(named)


def test_pure_python_is_never_a_mismatch(site: Site) -> None:
    info = install(site)
    (info / "WHEEL").write_text("Root-Is-Purelib: true\nTag: py2-none-any\n")
    (distribution,) = distributions(name="acme", path=[str(site.path)])
    assert build_mismatch(distribution) == ""
    assert build_mismatch(None) == ""


def test_lock_is_checked_before_the_first_import(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site)
    path = tmp_path / "plugins.lock"
    path.write_text(as_toml(freeze(Catalog.discover(check=False).all())))
    catalog = discover(monkeypatch, TOKENSPEED_PLUGINS_LOCK=str(path))
    before = catalog.digest()
    (site.path / "acme_policy.py").write_text("run = exit")
    with pytest.raises(TokenSpeedError, match=r"acme 1\.0: files changed"):
        Catalog.discover()
    unchecked = Catalog.discover(check=False)
    with pytest.raises(TokenSpeedError, match="acme"):
        unchecked.load(unchecked.get("policies", "acme/p"), object)
    assert "acme_policy" not in sys.modules
    path.write_text(as_toml(freeze(Catalog.discover(check=False).all())))
    assert Catalog.discover().digest() != before


def test_locked_plugin_that_fails_ends_the_start(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install("acme", ENTRY, files={"acme_policy.py": "raise RuntimeError('no')"})
    path = tmp_path / "plugins.lock"
    path.write_text(as_toml(freeze(Catalog.discover(check=False).all())))
    catalog = discover(monkeypatch, TOKENSPEED_PLUGINS_LOCK=str(path))
    with pytest.raises(PluginError, match="RuntimeError"):
        catalog.load(catalog.get("policies", "acme/p"), object)


def test_lock_needs_the_preflight_check(tmp_path: Path) -> None:
    selection = Selection(lock=str(tmp_path / "plugins.lock"))
    with pytest.raises(PluginError, match="tokenspeed-plugin-tools"):
        Catalog.discover(selection, distributions=[])


def test_third_parties_cannot_provide_a_check(site: Site) -> None:
    site.install("acme", {"preflight mine": "acme:check [api1]"})
    catalog = Catalog.discover(check=False)
    assert [entry.distribution for entry in catalog.entries("preflight")] == [
        "tokenspeed-plugin-tools"
    ]
