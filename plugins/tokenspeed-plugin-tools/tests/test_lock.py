"""`plugins freeze` and `plugins verify`, and the changes that they detect."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_site import Site
from tokenspeed_plugin_tools.lock_file import Locked, LockError, as_toml, read_lock

from tokenspeed_core.cli import main


@pytest.fixture
def lock(site: Site, tmp_path: Path) -> Path:
    """Install a plugin and write a lock."""
    files = {"acme/__init__.py": "run = print", "acme/data.json": "{}"}
    site.install("acme", {"policies acme/p": "acme:run [api1]"}, files=files)
    path = tmp_path / "plugins.lock"
    assert main(["plugins", "freeze", "-o", str(path)]) == 0
    return path


def mismatches(path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    status = main(["plugins", "verify", str(path), "--json"])
    found: list[str] = json.loads(capsys.readouterr().out)["mismatches"]
    assert status == (1 if found else 0)
    return found


def test_unchanged_plugins_match(lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mismatches(lock, capsys) == []
    assert main(["plugins", "freeze"]) == 0
    assert capsys.readouterr().out == lock.read_text()


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("acme/__init__.py", "run = exit"),
        ("acme/data.json", "[]"),
        ("acme/new.py", ""),
        ("acme/data.json", None),
        ("acme-1.0.dist-info/entry_points.txt", "[tokenspeed.policies]\nq = acme:run [api1]\n"),
    ],
)
def test_changed_files_are_found(
    lock: Path, site: Site, capsys: pytest.CaptureFixture[str], file: str, text: str | None
) -> None:
    path = site.path / file
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    (line,) = mismatches(lock, capsys)
    assert line.startswith("acme 1.0")
    assert "pip install" in line


def test_bytecode_and_installer_files_may_change(
    lock: Path, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = site.path / "acme" / "__pycache__"
    cache.mkdir(exist_ok=True)
    (cache / "x.pyc").write_bytes(b"")
    (site.path / "acme-1.0.dist-info" / "INSTALLER").write_text("uv")
    assert mismatches(lock, capsys) == []


def test_missing_new_and_disabled_plugins_are_found(
    lock: Path, site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site.install("other", {"policies o": "other:run [api1]"}, files={"other.py": "run = print"})
    (line,) = mismatches(lock, capsys)
    assert "other" in line
    assert "not locked" in line
    monkeypatch.setenv("TOKENSPEED_PLUGINS", "-acme,-other")
    (line,) = mismatches(lock, capsys)
    assert "disabled" in line
    lock.write_text(lock.read_text().replace("[acme]", "[gone]"))
    assert any("not installed" in each for each in mismatches(lock, capsys))


def test_editable_install_is_locked_with_its_folder(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "acme_here.py").write_text("run = print")
    info = site.install("acme", {"policies p": "acme_here:run [api1]"})
    record = {"url": f"file://{project}", "dir_info": {"editable": True}}
    (info / "direct_url.json").write_text(json.dumps(record))
    (site.path / "acme_here.py").write_text("run = print")
    path = tmp_path / "plugins.lock"
    assert main(["plugins", "freeze", "-o", str(path)]) == 0
    assert read_lock(str(path))["acme"].editable == str(project)
    (info / "direct_url.json").unlink()
    (line,) = mismatches(path, capsys)
    assert "editable" in line


def test_missing_code_cannot_be_locked(site: Site, refusal: Callable[..., str]) -> None:
    site.install("acme", {"policies p": "acme_gone:run [api1]"})
    assert "acme" in refusal("plugins", "freeze")


def test_failed_write_keeps_the_old_lock(
    lock: Path, monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str]
) -> None:
    before = lock.read_text()

    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(Path, "replace", fail)
    assert "No space left" in refusal("plugins", "freeze", "-o", str(lock))
    assert lock.read_text() == before
    assert [path for path in os.listdir(lock.parent) if path.startswith(".plugins.lock")] == []


@pytest.mark.parametrize(
    "text",
    [None, "", "x", 'a = "b"', "[acme]\nversion = '1'", "[acme]\nversion = 1\nentry_points = []"],
)
def test_invalid_lock_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "plugins.lock"
    if text is not None:
        path.write_text(text)
    with pytest.raises(LockError, match=r"plugins\.lock"):
        read_lock(str(path))


def test_lock_file_round_trips(tmp_path: Path) -> None:
    locked = {"acme": Locked("1.0", "ab", ('models "x" = a:b',), "/some/folder")}
    path = tmp_path / "plugins.lock"
    path.write_text(as_toml(locked).replace("[acme]", "[Acme]"))
    assert read_lock(str(path)) == locked
