"""The conformance suite of distributions: imports, versions and entries."""

from __future__ import annotations

import re
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from tokenspeed_testing.distribution import DistributionConformance, core_range

pytestmark = pytest.mark.slow


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that installs a package `acme` and returns its conformance suite."""

    def make(source: str, folder: str = "site") -> DistributionConformance:
        site = tmp_path / folder
        info = site / "acme-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: acme\nVersion: 1.0\nRequires-Dist: tokenspeed-core>=0.1\n"
        )
        (info / "entry_points.txt").write_text("[tokenspeed.commands]\nacme = acme:run [api1]\n")
        (site / "acme").mkdir()
        (site / "acme" / "__init__.py").write_text(source)
        monkeypatch.syspath_prepend(str(site))
        return type("Acme", (DistributionConformance,), {"distribution": "acme"})()

    yield make
    sys.modules.pop("acme", None)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from tokenspeed_core.scheduler import policy", "tokenspeed_core.scheduler.policy"),
        ("def run():\n    import tokenspeed_core.kv_cache", "tokenspeed_core.kv_cache"),
        ("from tokenspeed_core import kernels", "tokenspeed_core.kernels"),
        ("from tokenspeed_core.api import importlib", "tokenspeed_core.api.importlib"),
    ],
)
def test_internal_imports_are_found(package: Any, source: str, name: str) -> None:
    with pytest.raises(AssertionError, match=rf"__init__\.py:\d: {re.escape(name)}\b"):
        package(f"{source}\n").test_imports_only_public_api()


def test_public_names_may_be_imported(package: Any) -> None:
    source = (
        "from tokenspeed_core import LLM, __version__, api\n"
        "from tokenspeed_core.api import View\n"
        "from tokenspeed_core.commands.settings import configure\nrun = print\n"
    )
    package(source).test_imports_only_public_api()


def test_wrong_version_is_found(package: Any) -> None:
    suite = package('__version__ = "0.9"\nrun = print\n')
    with pytest.raises(AssertionError, match=r"0\.9.* 1\.0"):
        suite.test_installed_once_with_its_version()


def test_second_installation_is_found(package: Any) -> None:
    package("run = print\n", "first")
    with pytest.raises(AssertionError, match="installed 2 times"):
        package("run = print\n", "second").test_installed_once_with_its_version()


SPEC = """
from tokenspeed_core.api import Capability, KernelSpec
run = KernelSpec("greedy", "{backend}", Capability(("cpu",), ("float32",)), "{load}", reference={reference})
"""


@pytest.fixture
def kernels(package: Any, tmp_path: Path) -> Any:
    """Return a function that installs a package `acme` with a kernel and returns its suite."""

    def make(backend: str, load: str, *, reference: bool) -> DistributionConformance:
        suite: DistributionConformance = package(
            SPEC.format(backend=backend, load=load, reference=reference)
        )
        (tmp_path / "site" / "acme-1.0.dist-info" / "entry_points.txt").write_text(
            "[tokenspeed.kernels.sampling]\nacme = acme:run [api1]\n"
        )
        return suite

    return make


@pytest.mark.parametrize(
    ("backend", "reference", "message"),
    [
        ("acme", True, "acme:make .* greedy"),
        ("other", False, "is not a KernelSpec with backend 'acme'"),
    ],
)
def test_unusable_kernel_fails(kernels: Any, backend: str, reference: bool, message: str) -> None:
    suite = kernels(backend, "acme:make", reference=reference)
    with pytest.raises(AssertionError, match=rf"kernels\.sampling acme: .*{message}"):
        suite.test_entries_load()


def test_reference_kernel_passes(kernels: Any) -> None:
    kernels(
        "acme", "tokenspeed_kernels.reference.sampling:greedy", reference=True
    ).test_entries_load()


def test_core_range_covers_two_minor_versions() -> None:
    assert core_range("0.1.0") == "tokenspeed-core>=0.1,<0.3"
    assert core_range("1.9.2.dev1") == "tokenspeed-core>=1.9,<1.11"


@pytest.mark.parametrize(
    "name",
    sorted(
        {str(d.name) for d in distributions() if str(d.name).startswith("tokenspeed-")}
        - {"tokenspeed-core", "tokenspeed-server", "tokenspeed-testing"}
    ),
)
def test_our_own_distributions_pass(name: str) -> None:
    suite = type("Ours", (DistributionConformance,), {"distribution": name})()
    suite.test_metadata_is_complete()
    suite.test_imports_only_public_api()
    suite.test_installed_once_with_its_version()
