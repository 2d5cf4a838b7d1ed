"""Whoever lists, examines or checks a plugin reads what it uses that the core will not have for long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from fake_site import Site
from tokenspeed_testing.distribution import core_range

# What Python imports first in every process: the core deprecates a name, and a contract that it still takes.
MADE_UP = """
from tokenspeed_core import api
from tokenspeed_core.plugins.deprecations import DEPRECATED, Deprecation
from tokenspeed_core.plugins.kinds import KINDS, Kind
DEPRECATED["tokenspeed_core.api.Glance"] = Deprecation("0.2", "0.4", "tokenspeed_core.api.View")
DEPRECATED["kind hooks [api1]"] = Deprecation("0.3", "0.5", "[api2]")
api._Glance = api.View
api.__all__ = [*api.__all__, "Glance"]
KINDS["hooks"] = Kind(2, is_named=False)
"""
HOOKS = """from tokenspeed_core.api import hookimpl
from tokenspeed_core.api import Glance

@hookimpl
def observe_step(record):
    pass
"""
NAME = (
    "tokenspeed_core.api.Glance is deprecated since tokenspeed-core 0.2 and goes with 0.4; "
    "use tokenspeed_core.api.View"
)
CONTRACT = "kind hooks [api1] is deprecated since tokenspeed-core 0.3 and goes with 0.5; use [api2]"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(site: Site) -> Run:
    """Install a plugin that uses both, and run commands where they are deprecated."""
    (site.path / "sitecustomize.py").write_text(MADE_UP)
    site.install(
        "acme-flash",
        {"hooks flash": "acme_flash [api1]"},
        requires=core_range(),
        files={"acme_flash/__init__.py": HOOKS},
    )

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "tokenspeed_core.cli", "plugins", *words]
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(site.path)},
        )

    return run


def test_the_list_names_the_contract_that_goes_and_imports_nothing(run: Run) -> None:
    done = run("list", "--kind", "hooks")
    assert f"acme-flash hooks (flash): {CONTRACT}" in done.stdout.splitlines()
    assert done.stderr == ""
    records = json.loads(run("list", "--kind", "hooks", "--json").stdout)
    (record,) = (each for each in records if each["distribution"] == "acme-flash")
    assert (record["status"], record["deprecated"]) == ("ok", CONTRACT)


def test_the_doctor_notes_each_use_with_the_line_that_mends_it(run: Run) -> None:
    findings = json.loads(run("doctor", "--json").stdout)["findings"]
    found = [each for each in findings if each["distribution"] == "acme-flash"]
    assert [each["what"] for each in found] == [f"flash: {CONTRACT}", f"__init__.py:2: {NAME}"]
    assert {each["mend"] for each in found} == {
        "pip install --upgrade acme-flash, or tell its author"
    }
    assert all(each["is_note"] for each in found)


def test_a_check_passes_and_says_what_will_not_last(run: Run) -> None:
    done = run("check", "acme-flash")
    assert done.returncode == 0, done.stdout
    assert f"          flash: {CONTRACT}\n          __init__.py:2: {NAME}\n" in done.stdout
    assert "acme-flash: passed (8 ok, 0 failed, 0 skipped)" in done.stdout


def test_importing_the_plugin_warns_with_its_name(run: Run, site: Site) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import acme_flash"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(site.path)},
    )
    assert (
        f"{site.path}/acme_flash/__init__.py:2: FutureWarning: acme_flash: {NAME}\n" in done.stderr
    )
