"""Modules that are never imported, and plugins that fail."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tokenspeed_core.api.ops import common_ops
from tokenspeed_core.errors import PluginError
from tokenspeed_core.kernels.installed import installed_ops
from tokenspeed_core.plugins import Catalog, Selection, Status
from tokenspeed_core.plugins.hooks import Hooks

SPY = "open('/dev/stderr', 'w').write('IMPORTED'); run = SPEC = None"


def install(folder: Path, name: str, entries: str, files: dict[str, str] | None = None) -> None:
    """Write a distribution's metadata and modules, as pip would."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entries)
    for file, text in (files or {}).items():
        (folder / file).write_text(text)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder on `sys.path`; unload its modules afterwards."""
    monkeypatch.delenv("TOKENSPEED_PLUGINS", raising=False)
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield folder
    for module in set(sys.modules) - before:
        if (getattr(sys.modules[module], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[module]


def discover(
    *folders: Path | str, environ: dict[str, str] | None = None, strict: bool = False
) -> Catalog:
    found = distributions(path=[str(folder) for folder in folders])
    return Catalog.discover(Selection.read(environ or {}), distributions=found, strict=strict)


def tokenspeed(*words: str, cwd: Path, **environ: str) -> str:
    """Run a command in a folder and return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "tokenspeed_core.cli", *words],
        cwd=cwd,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.stdout + done.stderr


def test_working_directory_cannot_provide_a_command(tmp_path: Path) -> None:
    entries = "[tokenspeed.commands]\nlurk = lurking:run [api1]\n"
    install(tmp_path, "lurking", entries, {"lurking.py": SPY})
    output = tokenspeed("lurk", cwd=tmp_path)
    assert "lurk: no such command" in output
    assert "IMPORTED" not in output


def test_working_directory_cannot_replace_a_module(site: Path, tmp_path: Path) -> None:
    entries = "[tokenspeed.commands]\ngreet = greeter:run [api1]\n"
    install(site, "greeter", entries, {"greeter.py": "def run(words): print('hello')"})
    here = tmp_path / "here"
    here.mkdir()
    (here / "greeter.py").write_text(SPY)
    assert tokenspeed("greet", cwd=here, PYTHONPATH=str(site)) == "hello\n"


def test_selected_plugin_must_be_usable(site: Path) -> None:
    install(site, "early", "[tokenspeed.models]\nx = early:SPEC [api9]\n")
    install(
        site,
        "broken",
        "[tokenspeed.models]\ny = broken:SPEC [api1]\n",
        {"broken.py": "raise RuntimeError"},
    )
    assert discover(site).all()
    with pytest.raises(
        PluginError,
        match=r"early.*models x is incompatible",
    ):
        discover(site, environ={"TOKENSPEED_PLUGINS": "early"})
    catalog = discover(site, environ={"TOKENSPEED_PLUGINS": "broken"})
    with pytest.raises(PluginError, match=r"models y of broken 1\.0.*RuntimeError"):
        catalog.load(catalog.get("models", "y"), object)


OPS = """
from dataclasses import replace
from tokenspeed_core.api.ops import common_ops
one = next(iter(common_ops().values()))
FIRST = replace(one, name="first")
BAD = (replace(one, name="half"), {second})
"""


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ("one", "is already defined"),
        ("FIRST", "is already defined"),
        ("3", "3 is not an OpContract"),
    ],
)
def test_one_bad_op_fails_the_whole_entry(site: Path, second: str, reason: str) -> None:
    entries = "[tokenspeed.ops]\na = some_ops:FIRST [api1]\nb = some_ops:BAD [api1]\n"
    install(site, "some-ops", entries, {"some_ops.py": OPS.format(second=second)})
    catalog = discover(site)
    assert set(installed_ops(catalog)) == {*common_ops(), "first"}
    assert [entry.status for entry in catalog.all()] == [Status.OK, Status.FAILED]
    assert reason in catalog.all()[1].reason
    with pytest.raises(PluginError, match=r"not an OpContract|already defined"):
        installed_ops(discover(site, strict=True))


def test_failing_hook_module_leaves_no_hook(
    site: Path,
) -> None:
    text = "from tokenspeed_core.api import hookimpl\n@hookimpl\ndef observe_step(record): ...\nimport no_such\n"
    install(site, "half", "[tokenspeed.hooks]\nhalf = half_hooks [api1]\n", {"half_hooks.py": text})
    catalog = discover(site)
    assert Hooks.load(catalog).observer("observe_step") is None
    assert "half_hooks" not in sys.modules
    (entry,) = catalog.all()
    assert entry.status is Status.FAILED
    assert 'half_hooks.py", line 4' in entry.traceback
