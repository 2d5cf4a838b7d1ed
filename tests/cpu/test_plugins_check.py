"""What the distribution's suite asks of the sources: only what is public of the core, and one true version."""

from __future__ import annotations

import re
import sys
from importlib.metadata import distributions
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
from tokenspeed_testing.distribution import DistributionConformance, core_range
from tokenspeed_testing.imports import is_public

from tokenspeed_core import commands

pytestmark = pytest.mark.slow


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that installs a package `acme` of some source, and returns its suite."""

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


def test_a_plugin_that_imports_internals_of_the_core_fails(package: Any) -> None:
    suite = package(
        "from tokenspeed_core.scheduler import policy\ndef run(words):\n    import tokenspeed_core.kv_cache\n"
    )
    with pytest.raises(
        AssertionError, match=r"tokenspeed_core.scheduler.policy; .*tokenspeed_core.kv_cache"
    ):
        suite.test_it_imports_only_what_is_public_of_the_core()


def test_what_is_public_may_be_imported(package: Any) -> None:
    source = "from tokenspeed_core import LLM, __version__, api\nfrom tokenspeed_core.api import View\nrun = print\n"
    package(source).test_it_imports_only_what_is_public_of_the_core()
    assert is_public("tokenspeed_testing.kernel.KernelConformance")
    assert is_public("tokenspeed_core.commands.settings.configure")
    assert all(
        is_public(f"tokenspeed_core.commands.{each.name}")
        for each in iter_modules(commands.__path__)
    )
    assert not is_public("tokenspeed_core.commands.settings.Path")
    assert not is_public("tokenspeed_core.apiary")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (
            "import importlib\nimportlib.import_module('tokenspeed_core.scheduler')",
            "tokenspeed_core.scheduler",
        ),
        (
            "from importlib import import_module\nimport_module('tokenspeed_core.' + 'kv')",
            "tokenspeed_core.kv_cache",
        ),
        (
            "import importlib\nimportlib.import_module('.kv', package='tokenspeed_core')",
            "tokenspeed_core.kv_cache",
        ),
        (
            "run = __import__('tokenspeed_core.llm', fromlist=['LLM'])",
            "tokenspeed_core.llm",
        ),
        (
            "import pkgutil\npkgutil.resolve_name('tokenspeed_core.kv_cache.pool:Pool')",
            "tokenspeed_core.kv_cache.pool.Pool",
        ),
        (
            "import sys\nrun = sys.modules['tokenspeed_core.engine.requests']",
            "tokenspeed_core.engine.requests",
        ),
        (
            "import sys\nrun = sys.modules.get('tokenspeed_core.engine.requests')",
            "tokenspeed_core.engine.requests",
        ),
        ("from tokenspeed_core import kernels", "tokenspeed_core.kernels"),
        ("from tokenspeed_core import scheduler as api", "tokenspeed_core.scheduler"),
        ("from tokenspeed_core.api import warn", "tokenspeed_core.api.warn"),
        (
            "from tokenspeed_testing.kernel import _named",
            "tokenspeed_testing.kernel._named",
        ),
        ("import tokenspeed_core as core\nrun = core.kv.pool", "tokenspeed_core.kv_cache.pool"),
        (
            "import tokenspeed_core.api\nrun = tokenspeed_core.llm.LLM",
            "tokenspeed_core.llm.LLM",
        ),
        (
            "import tokenspeed_core\nrun = getattr(tokenspeed_core, 'kv')",
            "tokenspeed_core.kv_cache",
        ),
        ("from tokenspeed_core import api\nrun = api.importlib", "tokenspeed_core.api.importlib"),
    ],
)
def test_whatever_form_an_import_of_internals_has_its_sources_show_it(
    package: Any, source: str, name: str
) -> None:
    with pytest.raises(AssertionError, match=rf"__init__\.py:\d: {re.escape(name)}\b"):
        package(f"{source}\n").test_it_imports_only_what_is_public_of_the_core()


def test_a_name_that_a_source_also_has_for_something_else_is_not_followed(package: Any) -> None:
    source = "from tokenspeed_core import LLM, api\nLLM._made\ndef run(api):\n    return api.kv, api.modules['kv']\n"
    package(source).test_it_imports_only_what_is_public_of_the_core()


@pytest.mark.parametrize("beside", ["acme_parts.py", "acme_parts/inner.py"])
def test_what_is_installed_beside_the_package_of_an_entry_is_read_as_well(
    package: Any, tmp_path: Path, beside: str
) -> None:
    suite = package("run = print\n")
    path = tmp_path / "site" / beside
    path.parent.mkdir(exist_ok=True)
    path.write_text("import tokenspeed_core.kv_cache\n")
    (tmp_path / "site" / "acme-1.0.dist-info" / "RECORD").write_text(
        f"acme/__init__.py,,\n{beside},,\n"
    )
    with pytest.raises(AssertionError, match=rf"{path.name}:1: tokenspeed_core.kv_cache"):
        suite.test_it_imports_only_what_is_public_of_the_core()


def test_a_plugin_of_one_file_is_read(package: Any, tmp_path: Path) -> None:
    suite = package("")
    (tmp_path / "site" / "acme" / "__init__.py").unlink()
    (tmp_path / "site" / "acme").rmdir()
    (tmp_path / "site" / "acme.py").write_text("import tokenspeed_core.kv_cache\nrun = print\n")
    with pytest.raises(AssertionError, match=r"acme\.py:1: tokenspeed_core\.kv"):
        suite.test_it_imports_only_what_is_public_of_the_core()


@pytest.mark.parametrize(
    ("source", "held"),
    [
        (
            "import importlib\nrun = importlib.import_module('tokenspeed_core.{}'.format('kv.pool'))",
            "acme.run is tokenspeed_core.kv_cache.pool",
        ),
        (
            "import tokenspeed_testing.cases as it\nrun = it.problem_refusals",
            "acme.run is tokenspeed_core.kernels.select.problem_refusals",
        ),
        ("from acme.parts import kernels as run", "acme.parts.kernels is tokenspeed_core.kernels"),
    ],
)
def test_internals_that_a_loaded_plugin_holds_are_found_however_it_came_by_them(
    package: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, held: str
) -> None:
    suite = package(f"{source}\n")
    (tmp_path / "site" / "acme" / "parts.py").write_text(
        "import importlib\nkernels = importlib.import_module('{}_core.kernels'.format('tokenspeed'))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    if "parts" not in source:
        suite.test_it_imports_only_what_is_public_of_the_core()  # nothing that its sources show
    with pytest.raises(AssertionError, match=re.escape(held)):
        suite.test_what_it_loads_holds_only_what_is_public_of_the_core()


def test_a_plugin_may_hold_what_is_public_wherever_that_is_defined(
    package: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "import tokenspeed_core\nfrom tokenspeed_core import LLM, BadRequestError, api\n"
        "from tokenspeed_core.api import *\nfrom tokenspeed_core.commands import Catalog\n"
        "from tokenspeed_testing import cells\nfrom tokenspeed_testing.cases import beyond\n"
        "run, made = Catalog.discover, View\nclass Mine(LLM):\n    pass\n"
    )
    suite = package(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    suite.test_it_imports_only_what_is_public_of_the_core()
    suite.test_what_it_loads_holds_only_what_is_public_of_the_core()


def test_a_plugin_that_ends_the_process_as_it_is_loaded_is_said_to(
    package: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = package("import os\nos._exit(3)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    with pytest.raises(AssertionError, match="what its entries name ends the process"):
        suite.test_what_it_loads_holds_only_what_is_public_of_the_core()


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


SPEC = """
from tokenspeed_core.api import Capability, KernelSpec
run = KernelSpec("greedy", "{backend}", Capability(("cpu",), ("float32",)), "{load}", reference={reference})
"""


@pytest.fixture
def kernels(package: Any, tmp_path: Path) -> Any:
    """Return a function that installs a package `acme` of a kernel, and returns its suite."""

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
    ("backend", "reference", "said"),
    [
        ("acme", True, "it says reference=True and loads acme:make; that of greedy is "),
        ("other", False, "is no KernelSpec of backend 'acme'"),
    ],
)
def test_a_kernel_that_every_start_leaves_out_fails(
    kernels: Any, backend: str, reference: bool, said: str
) -> None:
    suite = kernels(backend, "acme:make", reference=reference)
    with pytest.raises(AssertionError, match=rf"kernels\.sampling acme: .*{said}"):
        suite.test_its_entries_load()


def test_a_kernel_that_a_start_takes_passes_also_as_the_reference_that_it_is(kernels: Any) -> None:
    kernels(
        "acme", "tokenspeed_kernels.reference.sampling:greedy", reference=True
    ).test_its_entries_load()


def test_a_package_made_now_works_for_two_minors() -> None:
    assert core_range("0.1.0") == "tokenspeed-core>=0.1,<0.3"
    assert core_range("1.9.2.dev1") == "tokenspeed-core>=1.9,<1.11"


@pytest.mark.parametrize(
    "name",
    sorted(
        {str(d.name) for d in distributions() if str(d.name).startswith("tokenspeed-")}
        - {"tokenspeed-core"}
    ),
)
def test_our_own_distributions_pass(name: str) -> None:
    suite = type("Ours", (DistributionConformance,), {"distribution": name})()
    suite.test_its_metadata_names_known_kinds_their_api_and_the_core_it_needs()
    suite.test_it_imports_only_what_is_public_of_the_core()
    suite.test_what_it_loads_holds_only_what_is_public_of_the_core()
    suite.test_it_is_installed_once_and_says_its_version_truly()
