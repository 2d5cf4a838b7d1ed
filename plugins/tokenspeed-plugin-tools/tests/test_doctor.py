"""`tokenspeed plugins doctor` finds broken installations and says how to repair them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from fake_site import Site
from tokenspeed_plugin_tools.probe import Probe, probe

from tokenspeed_core.cli import main
from tokenspeed_core.commands import Entry

CORE = "tokenspeed-core>=0.1"


def findings(capsys: pytest.CaptureFixture[str], name: str) -> list[dict[str, str]]:
    """Return the findings of doctor about one distribution."""
    main(["plugins", "doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    return [each for each in report["findings"] if each["distribution"] == name]


@pytest.fixture(autouse=True)
def only_test_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not import the real plugins, which takes long."""

    def probe_some(entries: Sequence[Entry]) -> Mapping[Entry, Probe]:
        return probe([e for e in entries if not e.distribution.startswith("tokenspeed-")])

    monkeypatch.setattr("tokenspeed_plugin_tools.doctor.probe", probe_some)


def test_healthy_plugins_have_no_findings(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.install(
        "acme", {"policies p": "acme:run [api1]"}, requires=CORE, files={"acme.py": "run = print"}
    )
    assert findings(capsys, "acme") == []


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import no_such_library", "no_such_library"),
        ("import os; os._exit(5)", "status 5"),
        ("SPEC = 3", "run"),
        (None, "missing"),
    ],
)
def test_code_that_does_not_load_is_found(
    site: Site, capsys: pytest.CaptureFixture[str], source: str | None, problem: str
) -> None:
    files = {} if source is None else {"acme.py": source}
    site.install("acme", {"policies p": "acme:run [api1]"}, requires=CORE, files=files)
    (found,) = findings(capsys, "acme")
    assert problem in found["problem"]
    assert found["repair"]
    assert not found["is_note"]


@pytest.mark.parametrize(
    ("requires", "value", "problem"),
    [
        ("tokenspeed-core>=99", "acme:run [api1]", "tokenspeed-core >=99"),
        (CORE, "acme:run [api7]", "api 7"),
        ("no-such-distribution>=1", "acme:run [api1]", "no-such-distribution"),
        ("pluggy<0.1", "acme:run [api1]", "pluggy<0.1"),
    ],
)
def test_unmet_requirements_are_found(
    site: Site, capsys: pytest.CaptureFixture[str], requires: str, value: str, problem: str
) -> None:
    site.install("acme", {"policies p": value}, requires=requires, files={"acme.py": "run = print"})
    (found,) = findings(capsys, "acme")
    assert problem in found["problem"]


def test_unreadable_metadata_is_found(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    info = site.install("acme", {"policies p": "acme:run [api1]"})
    (info / "METADATA").unlink()
    (found,) = findings(capsys, "acme")
    assert str(info) in found["repair"]


def test_second_copy_is_found(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Site(tmp_path / "other")
    for each in (site, other):
        each.install(
            "acme",
            {"policies p": "acme:run [api1]"},
            requires=CORE,
            files={"acme.py": "run = print"},
        )
    monkeypatch.syspath_prepend(str(other.path))
    (found,) = findings(capsys, "acme")
    assert str(site.path) in found["problem"]


def test_name_conflict_is_found(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("first", "second"):
        site.install(
            name,
            {"policies p": f"{name}:run [api1]"},
            requires=CORE,
            files={f"{name}.py": "run = print"},
        )
    (found,) = findings(capsys, "first")
    assert "second" in found["problem"]


def test_outdated_editable_install_is_found(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    info = site.install(
        "acme", {"policies p": "acme:run [api1]"}, requires=CORE, files={"acme.py": "run = print"}
    )
    project = tmp_path / "project"
    project.mkdir()
    (project / "acme.py").write_text("run = print")
    (project / "pyproject.toml").write_text(
        '[project]\nname = "acme"\n[project.entry-points."tokenspeed.policies"]\n'
        'p = "acme:run [api1]"\nnew = "acme:run [api1]"\n'
    )
    record = {"url": f"file://{project}", "dir_info": {"editable": True}}
    (info / "direct_url.json").write_text(json.dumps(record))
    found = findings(capsys, "acme")
    assert any("new" in each["problem"] and "pip install -e" in each["repair"] for each in found)


def test_missing_library_is_a_note(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    kernel = (
        "from tokenspeed_core.api import Capability, KernelSpec\n"
        "SPEC = KernelSpec('greedy', 'acme', Capability(('cpu',), ('float32',)), 'acme:make',\n"
        "    requires=('no_such_module',), obtain='pip install it')\n"
    )
    site.install(
        "acme",
        {"kernels.sampling acme": "acme:SPEC [api1]"},
        requires=CORE,
        files={"acme.py": kernel},
    )
    (found,) = findings(capsys, "acme")
    assert found["is_note"]
    assert found["repair"] == "pip install it"


def test_wrong_selection_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKENSPEED_PLUGINS", "no-such-plugin")
    assert main(["plugins", "doctor"]) == 1
    assert "no-such-plugin" in capsys.readouterr().out
