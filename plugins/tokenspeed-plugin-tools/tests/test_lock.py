"""A lock: what `plugins freeze` writes, what is found changed, and that nothing is imported where anything is."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_site import Site
from tokenspeed_plugin_tools.lock import freeze, mismatches
from tokenspeed_plugin_tools.lock_file import LockError, as_toml, read_lock

from tokenspeed_core import TokenSpeedError
from tokenspeed_core.cli import main
from tokenspeed_core.commands import Catalog, Selection, Status

Refusal = Callable[..., str]
SPY = "raise SystemExit('a plugin was imported')"
ENTRY = {"models Toy": "toy.spec:SPEC [api1]"}


def lock(path: Path) -> str:
    """Freeze what is installed into a file, and return its name."""
    path.write_text(as_toml(freeze(Catalog.discover(Selection.read({})).all())))
    return str(path)


def found(file: str) -> list[str]:
    return mismatches(read_lock(file), Catalog.discover(Selection.read({})).all())


@pytest.fixture
def toy(site: Site) -> Site:
    site.install("toy", ENTRY, files={"toy/__init__.py": "", "toy/spec.py": "SPEC = 1"})
    return site


def test_a_lock_says_the_same_whenever_it_is_written_and_is_met(toy: Site, tmp_path: Path) -> None:
    first, again = lock(tmp_path / "one"), lock(tmp_path / "two")
    text = Path(first).read_text()
    assert text == Path(again).read_text()
    assert '[toy]\nversion = "1.0"\nsha256 = "' in text
    assert '    "models Toy = toy.spec:SPEC",\n' in text
    assert found(first) == []
    assert main(["plugins", "verify", first]) == 0


def test_a_lock_and_what_it_finds_are_told_as_json_too(
    toy: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    locked = lock(tmp_path / "lock")
    capsys.readouterr()
    assert main(["plugins", "freeze", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["toy"]["version"] == "1.0"
    assert main(["plugins", "verify", locked, "--json"]) == 0
    json.loads(capsys.readouterr().out)


def test_a_lock_is_written_whole_or_what_is_there_stays(
    toy: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Callable[..., str]
) -> None:
    path = tmp_path / "plugins.lock"
    assert main(["plugins", "freeze", "-o", str(path)]) == 0
    assert capsys.readouterr().out == ""
    written = path.read_text()
    assert main(["plugins", "freeze"]) == 0
    assert capsys.readouterr().out == written
    assert main(["plugins", "verify", str(path)]) == 0
    capsys.readouterr()
    nowhere = tmp_path / "missing" / "plugins.lock"
    assert refusal("plugins", "freeze", "-o", str(nowhere)) == (
        f"plugins freeze: {nowhere}: No such file or directory; nothing there was changed"
    )
    (tmp_path / "folder").mkdir()
    assert "Is a directory" in refusal("plugins", "freeze", "-o", str(tmp_path / "folder"))
    assert (tmp_path / "folder").is_dir()
    assert list(tmp_path.glob(".*")) == []


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("toy/spec.py", "SPEC = 2"),
        ("toy/new.py", "listed in no RECORD"),
        ("toy/deeper/new.so", "nor this, which would be imported in place of a module"),
        (
            "toy-1.0.dist-info/entry_points.txt",
            "[tokenspeed.models]\nToy = toy.other:SPEC [api1]\n",
        ),
    ],
)
def test_a_change_on_disk_is_found(toy: Site, tmp_path: Path, file: str, text: str) -> None:
    locked = lock(tmp_path / "lock")
    (toy.path / file).parent.mkdir(exist_ok=True)
    (toy.path / file).write_text(text)
    assert all(line.startswith("toy 1.0") for line in found(locked))
    assert "toy 1.0 has changed" in found(locked)[-1]
    assert "pip install --force-reinstall --no-deps toy==1.0" in found(locked)[-1]


def test_bytecode_and_what_installers_note_for_themselves_are_no_change(
    toy: Site, tmp_path: Path
) -> None:
    locked = lock(tmp_path / "lock")
    (toy.path / "toy/__pycache__").mkdir()
    (toy.path / "toy/__pycache__/spec.cpython-311.pyc").write_bytes(b"bytes")
    (toy.path / "toy-1.0.dist-info/INSTALLER").write_text("another")
    assert found(locked) == []


def test_what_is_missing_surplus_or_of_another_version_is_named_with_what_mends_it(
    toy: Site, tmp_path: Path
) -> None:
    toy.install("gone", {"models Gone": "gone:SPEC [api1]"}, files={"gone.py": ""})
    locked = lock(tmp_path / "lock")
    for name in ("toy", "gone"):
        (toy.path / f"{name}-1.0.dist-info").rename(tmp_path / name)
    toy.install("toy", ENTRY, version="1.1")
    toy.install("stranger", {"models Strange": "strange:SPEC [api1]"})
    assert found(locked) == [
        "gone 1.0 is not installed; `pip install --force-reinstall --no-deps gone==1.0`",
        "stranger 1.0 is not locked; `pip uninstall stranger` or TOKENSPEED_PLUGINS=-stranger goes without it",
        "toy is 1.1, locked is 1.0; `pip install --force-reinstall --no-deps toy==1.0`",
    ]


@pytest.mark.parametrize(
    ("frozen", "text"),
    [("toy", "toy,stranger"), ("toy", "toy,stranger:models"), ("-other", "-other")],
)
def test_the_line_that_goes_without_what_is_not_locked_keeps_what_is_set_and_meets_the_lock(
    toy: Site, monkeypatch: pytest.MonkeyPatch, frozen: str, text: str
) -> None:
    toy.install("other", {"models Other": "other:SPEC [api1]"}, files={"other.py": ""})
    locked = freeze(Catalog.discover(Selection.read({"TOKENSPEED_PLUGINS": frozen})).all())
    toy.install("stranger", {"models Strange": "strange:SPEC [api1]"})
    monkeypatch.setenv("TOKENSPEED_PLUGINS", text)
    (line,) = mismatches(locked, Catalog.discover(check=False).all())
    mend = f"TOKENSPEED_PLUGINS={frozen},-stranger"
    assert line == f"stranger 1.0 is not locked; `pip uninstall stranger` or {mend} goes without it"
    monkeypatch.setenv(*mend.split("=", 1))
    assert mismatches(locked, Catalog.discover().all()) == []


def test_what_the_user_leaves_out_need_not_be_locked_but_what_is_locked_may_not_be_left_out(
    toy: Site, tmp_path: Path
) -> None:
    toy.install(
        "two",
        {"models A": "two:A [api1]", "models B": "two:B [api1]"},
        files={"two.py": "A = B = 1"},
    )
    locked = lock(tmp_path / "lock")
    toy.install("stranger", {"models Strange": "strange:SPEC [api1]"})
    Catalog.discover(Selection.read({"TOKENSPEED_PLUGINS": "-stranger"}, lock=locked))
    for scope, what in (("toy", "toy 1.0 is"), ("two:models:A", "two 1.0: models A = two:A is")):
        mend = "take that back, or freeze without it"
        with pytest.raises(LockError) as caught:
            Catalog.discover(
                Selection.read({"TOKENSPEED_PLUGINS": f"-stranger,-{scope}"}, lock=locked)
            )
        assert f"  {what} disabled: left out by TOKENSPEED_PLUGINS=-{scope}; {mend}\n" in str(
            caught.value
        )


def test_an_editable_install_is_named_as_one_and_a_change_in_its_folder_is_found(
    site: Site, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    (project / "toy").mkdir(parents=True)
    (project / "toy/spec.py").write_text("SPEC = 1")
    (project / "toy/__init__.py").touch()
    info = site.install("toy", ENTRY)
    (info / "direct_url.json").write_text(
        f'{{"url": "file://{project}", "dir_info": {{"editable": true}}}}'
    )
    sys.path.insert(0, str(project))
    try:
        locked = lock(tmp_path / "lock")
        assert f'editable = "{project}"' in Path(locked).read_text()
        (project / "toy/spec.py").write_text("SPEC = 2")
        assert found(locked) == [f"toy 1.0 has changed: its files; restore what is under {project}"]
        (info / "direct_url.json").unlink()
        assert found(locked)[0].startswith(
            f"toy is no editable install, locked is an editable install of {project}"
        )
    finally:
        sys.path.remove(str(project))


def test_nothing_is_imported_where_a_lock_is_not_met(
    toy: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = lock(tmp_path / "lock")
    (toy.path / "toy/spec.py").write_text(SPY)
    with pytest.raises(LockError, match="what is installed is not what was locked"):
        Catalog.discover(Selection.read({}, lock=locked))
    monkeypatch.setenv("TOKENSPEED_PLUGINS_LOCK", locked)  # for every program of the environment
    unchecked = Catalog.discover(check=False)
    with pytest.raises(LockError):
        unchecked.load(unchecked.get("models", "Toy"), object)
    assert unchecked.get("models", "Toy").status is Status.OK
    assert "toy" not in sys.modules


@pytest.mark.parametrize("strict", [False, True])
def test_no_way_to_load_a_plugin_leads_past_the_lock(
    toy: Site, tmp_path: Path, strict: bool
) -> None:
    locked = lock(tmp_path / "lock")
    (toy.path / "toy/spec.py").write_text(SPY)
    for required in (False, True):
        catalog = Catalog.discover(Selection.read({}, lock=locked), strict=strict, check=False)
        with pytest.raises(LockError):
            catalog.load(catalog.get("models", "Toy"), object, required=required)
    assert "toy" not in sys.modules


def test_a_plugins_command_does_not_run_where_the_environments_lock_is_not_met(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site.install(
        "toy",
        {"commands play": "toy:play [api1]"},
        files={"toy.py": "def play(words): print('playing')"},
    )
    locked = lock(tmp_path / "lock")
    monkeypatch.setenv("TOKENSPEED_PLUGINS_LOCK", locked)
    assert main(["play"]) == 0
    del sys.modules["toy"]
    (site.path / "toy.py").write_text(SPY)
    assert main(["play"]) == 2
    assert "toy 1.0 has changed" in capsys.readouterr().err
    assert main(["--help"]) == 0  # what imports no plugin goes on


def test_a_locked_plugin_that_fails_to_load_ends_the_start(toy: Site, tmp_path: Path) -> None:
    (toy.path / "toy/spec.py").write_text("import no_such_library")
    catalog = Catalog.discover(Selection.read({}, lock=lock(tmp_path / "lock")))
    with pytest.raises(
        TokenSpeedError, match=r"models Toy of toy 1\.0 failed to load: ModuleNotFoundError"
    ):
        catalog.load(catalog.get("models", "Toy"), object)


def test_processes_agree_on_the_content_of_files_where_there_is_a_lock(
    toy: Site, tmp_path: Path
) -> None:
    launcher = Catalog.discover(Selection.read({}, lock=lock(tmp_path / "lock")))
    without = Catalog.discover(Selection.read({}))
    (toy.path / "toy/spec.py").write_text("SPEC = 2")
    engine = Catalog.discover(
        Selection.read({}, lock=lock(tmp_path / "lock"))
    )  # the file was changed meanwhile
    with pytest.raises(TokenSpeedError, match="other plugins than the launcher"):
        engine.verify(launcher.digest())
    with pytest.raises(TokenSpeedError, match="other plugins than the launcher"):
        without.verify(launcher.digest())


def test_names_in_a_lock_are_compared_as_the_index_compares_them(toy: Site, tmp_path: Path) -> None:
    locked = lock(tmp_path / "lock")
    text = Path(locked).read_text()
    Path(locked).write_text(
        text.replace("[toy]", "[TOY]").replace("[tokenspeed-kernels]", "[Tokenspeed_Kernels]")
    )
    assert found(locked) == []


@pytest.mark.parametrize(
    ("variable", "flags"),
    [
        (None, ["--no-plugins"]),
        ("-other", ["--no-plugins"]),
        ("-tokenspeed-chat", ["--no-plugins"]),
        ("-other", []),
        ("other", []),
        ("", []),
    ],
)
def test_what_writes_a_lock_sees_the_plugins_that_the_refused_command_saw(
    toy: Site,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str | None,
    flags: list[str],
) -> None:
    if variable == "-tokenspeed-chat":
        pytest.importorskip("tokenspeed_chat")
    toy.install("other", {"models Other": "other:SPEC [api1]"}, files={"other.py": "SPEC = 1"})
    words = ("serve", "--plugins-lock", lock(tmp_path / "lock"), "--dry-run", *flags)
    if variable is not None:
        monkeypatch.setenv("TOKENSPEED_PLUGINS", variable)
    assert main(words) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("where that is meant: `TOKENSPEED_PLUGINS=")
    typed = told.removeprefix("where that is meant: `").removesuffix("`")
    command = typed.replace(
        "tokenspeed plugins", f"{sys.executable} -P -m tokenspeed_core.cli plugins"
    )
    environ = {name: value for name, value in os.environ.items() if name != "TOKENSPEED_PLUGINS"}
    subprocess.run(["sh", "-c", command], check=True, env={**environ, "PYTHONPATH": str(toy.path)})
    main(words)
    assert "what is installed is not what was locked" not in capsys.readouterr().err


def test_code_that_is_gone_is_not_locked_and_is_missed_where_it_was(
    toy: Site, tmp_path: Path, refusal: Refusal, capsys: pytest.CaptureFixture[str]
) -> None:
    locked = lock(tmp_path / "lock")
    shutil.rmtree(toy.path / "toy")
    again = "`pip install --force-reinstall --no-deps toy==1.0`"
    assert found(locked) == [
        f"toy 1.0 has lost its code, only metadata is left in {toy.path}; {again}"
    ]
    said = "plugins freeze: of toy only metadata is left, and there is no code to lock"
    assert refusal("plugins", "freeze") == f"{said}; `tokenspeed plugins doctor` has what mends it"
    assert main(["plugins", "info", "toy", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sha256"] is None


def test_without_the_tools_a_lock_is_not_passed_over(tmp_path: Path) -> None:
    selection = Selection.read(
        {"TOKENSPEED_PLUGINS": "-tokenspeed-plugin-tools"}, lock=lock(tmp_path / "lock")
    )
    with pytest.raises(TokenSpeedError, match="what reads it is missing or left out"):
        Catalog.discover(selection)


def test_a_stranger_may_not_read_locks(site: Site, tmp_path: Path) -> None:
    site.install(
        "lenient", {"locks anything-goes": "lenient:accept [api1]"}, files={"lenient.py": SPY}
    )
    locked = lock(tmp_path / "lock")
    site.install("stranger", {"models Strange": "strange:SPEC [api1]"})
    with pytest.raises(LockError):
        Catalog.discover(Selection.read({}, lock=locked))
    assert "lenient" not in sys.modules


def test_serve_refuses_what_is_not_as_locked_and_names_it_and_verify_says_the_same(
    toy: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    locked = lock(tmp_path / "lock")
    (toy.path / "toy/spec.py").write_text(SPY)
    assert main(["serve", "--plugins-lock", locked, "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "no plugin is imported\n  toy 1.0 has changed" in said
    assert main(["plugins", "verify", locked]) == 1
    assert capsys.readouterr().out.strip() in said


def test_a_configuration_file_that_names_a_lock_is_held_to_it(
    toy: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    production = tmp_path / "production.yaml"
    production.write_text(f"plugins-lock: {lock(tmp_path / 'lock')}\nmodel: {tmp_path}/no-model\n")
    assert main(["serve", "--config", str(production), "--dry-run"]) == 2
    assert "plugins lock" not in capsys.readouterr().err
    (toy.path / "toy/spec.py").write_text(SPY)
    assert main(["serve", "--config", str(production), "--dry-run"]) == 2
    assert "no plugin is imported\n  toy 1.0 has changed" in capsys.readouterr().err


def test_the_changed_file_of_a_wheel_that_pip_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "toy/__init__.py": "",
        "toy/spec.py": "SPEC = 1\n",
        "toy/kernel.py": "",
        "toy-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n",
        "toy-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "toy-1.0.dist-info/entry_points.txt": "[tokenspeed.models]\nToy = toy.spec:SPEC [api1]\n",
    }
    wheel = tmp_path / "toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        record = ["toy-1.0.dist-info/RECORD,,"]
        for name, text in files.items():
            archive.writestr(name, text)
            digest = urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(text)}")
        archive.writestr("toy-1.0.dist-info/RECORD", "\n".join(record) + "\n")
    site = tmp_path / "installed"
    options = ["-q", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(wheel)], check=True)
    monkeypatch.syspath_prepend(str(site))
    locked = lock(tmp_path / "lock")
    assert found(locked) == []
    (site / "toy/spec.py").write_text("SPEC = 2\n")
    (site / "toy/kernel.py").unlink()
    assert found(locked) == [
        "toy 1.0 has changed: toy/kernel.py, toy/spec.py; `pip install --force-reinstall --no-deps toy==1.0`"
    ]


def test_every_process_of_a_server_checks_the_lock_of_the_configuration_that_it_is_given(
    toy: Site, tmp_path: Path
) -> None:
    from tokenspeed_core.config import Config
    from tokenspeed_core.engine.factory import discover

    config = Config.from_keywords(plugins_lock=lock(tmp_path / "lock"))
    launcher = discover(config)
    engine = discover(Config.from_wire(config.to_wire()))
    engine.verify(launcher.digest())
    (toy.path / "toy/spec.py").write_text(SPY)
    with pytest.raises(LockError):
        discover(Config.from_wire(config.to_wire()))


def test_the_commands_about_plugins_work_where_the_environments_lock_is_not_met_and_import_nothing(
    toy: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    locked = lock(tmp_path / "lock")
    (toy.path / "toy/spec.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    monkeypatch.setenv("TOKENSPEED_PLUGINS_LOCK", locked)
    assert main(["plugins", "doctor", "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    (finding,) = [each for each in findings if each["distribution"] == "TOKENSPEED_PLUGINS_LOCK"]
    assert (
        finding["what"]
        == "no plugin is imported: toy 1.0 has changed: it is another build of that version"
    )
    assert finding["mend"] == "`pip install --force-reinstall --no-deps toy==1.0`"
    assert main(["plugins", "list"]) == 0
    assert main(["plugins", "verify", locked]) == 1
    for words in (["list", "--load"], ["info", "toy"], ["check", "toy"]):
        capsys.readouterr()
        assert main(["plugins", *words]) == 2
        assert "no plugin is imported\n  toy 1.0 has changed" in capsys.readouterr().err
    assert not (tmp_path / "imported").exists()
    assert main(["plugins", "freeze"]) == 0
    Path(locked).write_text(capsys.readouterr().out)
    assert main(["plugins", "verify", locked]) == 0
    assert main(["plugins", "list", "--load"]) == 0
    assert (tmp_path / "imported").exists()


def test_doctor_works_without_the_lock_that_the_environment_names(
    toy: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing"
    monkeypatch.setenv("TOKENSPEED_PLUGINS_LOCK", str(missing))
    assert main(["plugins", "doctor"]) == 1
    said = capsys.readouterr().out
    assert f"no plugin is imported: plugins lock {missing}: No such file or directory\n" in said
    assert f"-> `tokenspeed plugins freeze -o {missing}` writes one" in said
