"""What the distribution's suite asks of the sources: only what is public of the core, and one true version."""

from __future__ import annotations

import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from tokenspeed_core.testing.distribution import DistributionConformance, core_range, is_public


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that installs a package `acme` of some source, and returns its suite."""

    def make(source: str, folder: str = "site") -> DistributionConformance:
        site = tmp_path / folder
        info = site / "acme-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: acme\nVersion: 1.0\nRequires-Dist: tokenspeed-core>=0.1\n")
        (info / "entry_points.txt").write_text("[tokenspeed.commands]\nacme = acme:run [api1]\n")
        (site / "acme").mkdir()
        (site / "acme" / "__init__.py").write_text(source)
        monkeypatch.syspath_prepend(str(site))
        return type("Acme", (DistributionConformance,), {"distribution": "acme"})()

    yield make
    sys.modules.pop("acme", None)


def test_a_plugin_that_imports_internals_of_the_core_fails(package: Any) -> None:
    suite = package("from tokenspeed_core.scheduler import policy\ndef run(words):\n    import tokenspeed_core.kv\n")
    with pytest.raises(AssertionError, match=r"tokenspeed_core.scheduler.policy; .*tokenspeed_core.kv"):
        suite.test_it_imports_only_what_is_public_of_the_core()


def test_what_is_public_may_be_imported(package: Any) -> None:
    source = "from tokenspeed_core import LLM, __version__, api\nfrom tokenspeed_core.api import View\nrun = print\n"
    package(source).test_it_imports_only_what_is_public_of_the_core()
    assert is_public("tokenspeed_core.testing.kernel.KernelConformance")
    assert not is_public("tokenspeed_core.apiary")


def test_a_version_that_is_not_that_of_the_metadata_is_found(package: Any) -> None:
    suite = package('__version__ = "0.9"\nrun = print\n')
    with pytest.raises(AssertionError, match=r"acme.__version__ is 0.9, and its metadata says 1.0"):
        suite.test_it_is_installed_once_and_says_its_version_truly()


def test_a_second_installation_is_found(package: Any) -> None:
    package("run = print\n", "first")
    with pytest.raises(AssertionError, match="installed 2 times"):
        package("run = print\n", "second").test_it_is_installed_once_and_says_its_version_truly()


def test_what_others_have_in_their_metadata_is_not_its_fault(package: Any, tmp_path: Path) -> None:
    suite = package("run = print\n")
    other = tmp_path / "site" / "other-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_bytes("Name: other\nVersion: 1.0\nSummary: \xe9\n".encode("latin-1"))
    suite.test_it_is_installed_once_and_says_its_version_truly()


def test_a_package_made_now_works_for_two_minors() -> None:
    assert core_range("0.1.0") == "tokenspeed-core>=0.1,<0.3"
    assert core_range("1.9.2.dev1") == "tokenspeed-core>=1.9,<1.11"


@pytest.mark.parametrize("name", sorted(
    {str(d.name) for d in distributions() if str(d.name).startswith("tokenspeed-")} - {"tokenspeed-core"}))
def test_our_own_distributions_pass(name: str) -> None:
    suite = type("Ours", (DistributionConformance,), {"distribution": name})()
    suite.test_its_metadata_names_known_kinds_their_api_and_the_core_it_needs()
    suite.test_it_imports_only_what_is_public_of_the_core()
    suite.test_it_is_installed_once_and_says_its_version_truly()
