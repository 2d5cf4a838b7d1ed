"""Nothing is loaded from the working directory, a model's folder or in place of a plugin; what fails leaves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.tags import sys_tags
from tokenspeed_testing.distribution import DistributionConformance
from tokenspeed_testing.explain import explain

from tokenspeed_core.api.kernels import Capability, InstalledKernel, KernelSpec, PlatformInfo
from tokenspeed_core.api.ops import common_ops
from tokenspeed_core.errors import PluginError
from tokenspeed_core.kernels.installed import installed_ops
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.plugins import Catalog, Selection, Status
from tokenspeed_core.plugins.hooks import Hooks
from tokenspeed_core.plugins.metadata import check_build

SPY = "open('/dev/stderr', 'w').write('IMPORTED'); run = SPEC = None"
MAIN = "import sys; from tokenspeed_core.cli import main; sys.exit(main())"  # run by -c, '' is first on sys.path


def install(
    folder: Path, name: str, entries: str, files: dict[str, str] | None = None, suffix: str = "dist"
) -> None:
    """Write a distribution's metadata and modules, as pip would; with another suffix, as older tools would."""
    info = folder / f"{name}-1.0.{suffix}-info"
    info.mkdir(parents=True)
    metadata = "METADATA" if suffix == "dist" else "PKG-INFO"
    (info / metadata).write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entries)
    for file, text in (files or {}).items():
        (folder / file).write_text(text)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on `sys.path`; what is imported from anywhere below its parent is forgotten afterwards."""
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


def tokenspeed(
    *words: str, cwd: Path, how: tuple[str, ...] = ("-m", "tokenspeed_core.cli"), **environ: str
) -> str:
    """Run a command somewhere and return all that it says."""
    done = subprocess.run(
        [sys.executable, *how, *words],
        cwd=cwd,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("suffix", ["dist", "egg"])
def test_a_plugin_that_lies_in_the_working_directory_is_shown_and_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    install(
        tmp_path,
        "lurking",
        "[tokenspeed.models]\nx = lurking:SPEC [api1]\n",
        {"lurking.py": SPY},
        suffix,
    )
    monkeypatch.chdir(tmp_path)
    for folder in ("", str(tmp_path), "."):
        (entry,) = discover(folder).all()
        assert entry.status is Status.DISABLED
        assert "is in the working directory" in entry.reason
        assert discover(folder).entries("models") == ()
    with pytest.raises(
        PluginError, match=r"nothing of it can be used; models x is disabled: it is in the working"
    ):
        discover(tmp_path, environ={"TOKENSPEED_PLUGINS": "lurking"})


def test_what_lies_in_the_working_directory_does_not_shadow_what_is_installed(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (tmp_path, site):
        install(
            folder, "acme", "[tokenspeed.models]\nx = acme:SPEC [api1]\n", {"acme.py": "SPEC = 1"}
        )
    monkeypatch.chdir(tmp_path)
    catalog = discover(tmp_path, site)
    assert [(entry.root, entry.status) for entry in catalog.all()] == [
        (str(site), Status.OK),
        (str(tmp_path), Status.SHADOWED),
    ]
    assert catalog.load(catalog.get("models", "x"), int) == 1


@pytest.mark.parametrize("how", [("-m", "tokenspeed_core.cli"), ("-c", MAIN)])
@pytest.mark.parametrize("suffix", ["dist", "egg"])
def test_a_command_that_lies_in_the_working_directory_is_no_command(
    tmp_path: Path, how: tuple[str, ...], suffix: str
) -> None:
    install(
        tmp_path,
        "lurking",
        "[tokenspeed.commands]\nlurk = lurking:run [api1]\n",
        {"lurking.py": SPY},
        suffix,
    )
    said = tokenspeed("lurk", cwd=tmp_path, how=how)
    assert (
        "lurk: no such command" in said
        or "it is in the working directory, from which nothing is loaded" in said
    )
    assert "IMPORTED" not in said
    (
        tmp_path / "elsewhere"
    ).mkdir()  # where it is no working directory, it is an installed plugin as any other
    assert "IMPORTED" in tokenspeed("lurk", cwd=tmp_path / "elsewhere", PYTHONPATH=str(tmp_path))


def test_a_module_in_the_working_directory_does_not_take_the_place_of_a_plugins(
    site: Path, tmp_path: Path
) -> None:
    entries = "[tokenspeed.commands]\ngreet = greeter:run [api1]\n"
    install(site, "greeter", entries, {"greeter.py": "def run(words): print('hello')"})
    here = tmp_path / "here"
    here.mkdir()
    (here / "greeter.py").write_text(SPY)
    assert tokenspeed("greet", cwd=here, PYTHONPATH=str(site)) == "hello\n"
    said = tokenspeed("greet", cwd=here, how=("-c", MAIN), PYTHONPATH=str(site))
    assert f"greeter would come from {here}/greeter.py, and greeter is in {site}" in said
    assert "IMPORTED" not in said


def test_a_module_of_the_same_name_earlier_on_the_path_is_not_imported_in_place_of_a_plugins(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = "[tokenspeed.models]\nx = outer_space.acme.spec:SPEC [api1]\n"
    for folder in (site, tmp_path / "other"):
        (folder / "outer_space/acme").mkdir(
            parents=True
        )  # outer_space is a namespace package: others share it
        for file in ("__init__.py", "spec.py"):
            (folder / "outer_space/acme" / file).write_text("SPEC = 1")
    install(site, "acme", entries)
    entry = discover(site).get("models", "x")
    assert entry.source() == site / "outer_space/acme"
    assert entry.intruder() is None
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    catalog = discover(site)
    assert catalog.load(entry, object) is None
    assert "outer_space.acme.spec would come from" in catalog.all()[0].reason
    assert "Traceback" in catalog.all()[0].traceback


def test_what_the_user_named_must_be_usable(site: Path) -> None:
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
        match="TOKENSPEED_PLUGINS names early, and nothing of it can be used; models x is",
    ):
        discover(site, environ={"TOKENSPEED_PLUGINS": "early"})
    catalog = discover(site, environ={"TOKENSPEED_PLUGINS": "broken"})
    with pytest.raises(PluginError, match=r"models y of broken 1\.0 failed to load: RuntimeError"):
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
        ("one", "has a contract already"),
        ("FIRST", "has a contract already"),
        ("3", "3 is no OpContract"),
    ],
)
def test_of_ops_of_which_one_is_refused_none_stays(site: Path, second: str, reason: str) -> None:
    entries = "[tokenspeed.ops]\na = brings_ops:FIRST [api1]\nb = brings_ops:BAD [api1]\n"
    install(site, "brings-ops", entries, {"brings_ops.py": OPS.format(second=second)})
    catalog = discover(site)
    assert set(installed_ops(catalog)) == {*common_ops(), "first"}
    assert [entry.status for entry in catalog.all()] == [Status.OK, Status.FAILED]
    assert reason in catalog.all()[1].reason
    with pytest.raises(PluginError, match=r"no OpContract|contract already"):
        installed_ops(discover(site, strict=True))


def test_of_a_module_of_hooks_that_fails_in_the_middle_no_hook_stays_and_its_traceback_is_kept(
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


# -- compiled code ------------------------------------------------------------------------------------------

NATIVE = KernelSpec("greedy", "native", Capability(("cpu",), ("float32",)), "native:make")
PLAIN = KernelSpec(
    "greedy", "plain", Capability(("cpu",), ("float32",)), "builtins:print", reference=True
)
HERE = str(next(sys_tags()))


@pytest.mark.parametrize(
    ("tags", "requires", "said"),
    [
        (("cp27-cp27m-win32",), "", "native was built for cp27-cp27m-win32, and this is "),
        ((HERE,), "packaging<1", "native was built for packaging<1, and "),
        ((HERE, "cp27-cp27m-win32"), "packaging>=1", ""),
        ((HERE,), "packaging<1; python_version < '3'", ""),
        ((HERE,), "packaging<1; extra == 'more'", ""),
        ((HERE,), "tokenspeed-no-such-thing>=1", ""),
    ],
)
def test_compiled_code_that_was_built_for_something_else_is_not_loaded_and_the_reason_is_kept(
    site: Path, tags: tuple[str, ...], requires: str, said: str
) -> None:
    install(site, "native", "", {"native.py": "make = print"})
    info = site / "native-1.0.dist-info"
    (info / "WHEEL").write_text(
        "Root-Is-Purelib: false\n" + "".join(f"Tag: {tag}\n" for tag in tags)
    )
    with (info / "METADATA").open("a") as metadata:
        metadata.write(f"Requires-Dist: {requires}\n" if requires else "")
    kernels = [InstalledKernel(NATIVE, "native"), InstalledKernel(PLAIN, "tokenspeed-kernels")]
    selector = Selector(kernels, PlatformInfo("cpu"))
    taken = selector.select("greedy", {"vocab_size": 64, "dtype": "float32"}).spec.backend
    assert taken == ("plain" if said else "native")
    assert ("native" in sys.modules) == (not said), "a library of another build was loaded"
    why = f"not native from native: it does not load: ImportError: {said}"
    assert (why in explain(selector.plan(), "greedy")) == bool(said)
    (question,) = (name for name in vars(DistributionConformance) if "compiled_code" in name)
    suite = type("Native", (DistributionConformance,), {"distribution": "native"})()
    with pytest.raises(AssertionError, match=said) if said else nullcontext():
        getattr(suite, question)()


def test_what_brings_no_compiled_code_is_loaded_whatever_is_here(site: Path) -> None:
    install(site, "native", "", {"native.py": "make = print"})
    info = site / "native-1.0.dist-info"
    (info / "WHEEL").write_text("Root-Is-Purelib: true\nTag: py2-none-any\n")
    check_build("native")
    check_build("nobody-installed-this")
