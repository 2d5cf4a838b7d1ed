"""Plugins that fail to import or have an invalid descriptor."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from made_plugins import Install, attention, discover

from tokenspeed_core.api.kernels import PlatformInfo
from tokenspeed_core.errors import PluginError, SelectionError
from tokenspeed_core.kernels.installed import installed_kernels
from tokenspeed_core.kernels.overrides import Override
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.plugins import Catalog, Status


def test_failed_import_leaves_others_usable(
    install: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "broken_one.py").write_text("import no_such_library")
    (tmp_path / "modules" / "fine_one.py").write_text("SPEC = 3")
    found = install(
        "both", attention("bad", "broken_one:S [api1]") + "good = fine_one:SPEC [api1]\n"
    )
    catalog = discover(found)
    bad, good = catalog.entries("kernels.attention")
    assert catalog.load(bad, object) is None
    assert catalog.load(good, int) == 3
    assert catalog.names("kernels.attention") == ("good",)
    assert "Traceback" in caplog.text
    with pytest.raises(PluginError, match=r"bad of both 1.0 failed to load: ModuleNotFoundError"):
        catalog.get("kernels.attention", "bad")
    with pytest.raises(PluginError, match=r"--attention-backend.*TOKENSPEED_PLUGINS=-both"):
        catalog.load(bad, object, required=True)
    strict = discover(found, strict=True)
    with pytest.raises(PluginError):
        strict.load(strict.get("kernels.attention", "bad"), object)


def test_syntax_error_names_file_and_line(install: Install, tmp_path: Path) -> None:
    (tmp_path / "modules").mkdir()
    module = tmp_path / "modules" / "misspelt_one.py"
    module.write_text("SPEC = 3\ndef\n")
    catalog = discover(install("some", attention("bad", "misspelt_one:SPEC [api1]")))
    with pytest.raises(PluginError, match=rf"SyntaxError: invalid syntax \({module}, line 2\)"):
        catalog.need(catalog.get("kernels.attention", "bad"), object)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        ("RuntimeError('line1\\nline2\\n  line3')", "RuntimeError: line1 line2 line3"),
        ("RuntimeError()", "RuntimeError"),
        ("OSError('a' * 300 + 'z' * 300)", f"OSError: {'a' * 300}{'z' * 300}"),
        ("OSError('a' * 5000 + 'z' * 5000)", f"OSError: {'a' * 400} … {'z' * 400}"),
        (
            "type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})()",
            "Mute: its message cannot be read",
        ),
    ],
)
def test_failure_is_reported_in_one_line(
    install: Install, tmp_path: Path, raised: str, expected: str
) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "raising_one.py").write_text(f"raise {raised}")
    catalog = discover(install("some", attention("bad", "raising_one:S [api1]")))
    with pytest.raises(PluginError, match=re.escape(f"failed to load: {expected}. ")):
        catalog.need(catalog.get("kernels.attention", "bad"), object)
    (entry,) = catalog.all()
    assert entry.reason == expected
    assert entry.traceback.startswith("Traceback")


def test_descriptor_of_another_type_fails(install: Install, tmp_path: Path) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "wrong_type.py").write_text("SPEC = 'text'")
    catalog = discover(install("wrong", attention("x", "wrong_type:SPEC [api1]")))
    entry = catalog.get("kernels.attention", "x")
    assert catalog.load(entry, int) is None
    assert "wrong_type:SPEC is of type str, expected int" in catalog.all()[0].reason


def test_descriptor_must_be_a_kernel_spec(
    install: Install,
) -> None:
    found = install("odd", attention("odd", "types:SimpleNamespace [api1]"))
    catalog = discover(found)
    assert installed_kernels(catalog) == ()
    assert [entry.status for entry in catalog.all()] == [Status.FAILED]
    assert "is not a KernelSpec with backend 'odd'" in catalog.all()[0].reason
    with pytest.raises(PluginError, match=r"kernels.attention odd of odd 1\.0.*'odd'"):
        installed_kernels(discover(found, strict=True))


@pytest.mark.parametrize("spec", ["REFERENCE", "OTHER, REFERENCE"])
def test_false_reference_is_skipped(install: Install, tmp_path: Path, spec: str) -> None:
    found = install("evil", "[tokenspeed.kernels.sampling]\nevil = claims:SPEC [api1]\n")
    (tmp_path / "modules" / "claims.py").write_text(
        "from tokenspeed_core.api import Capability, KernelSpec\n"
        "CAN = Capability(('cpu',), ('float32',))\n"
        "REFERENCE = KernelSpec('greedy', 'evil', CAN, 'claims:make', reference=True)\n"
        f"OTHER = KernelSpec('sample', 'evil', CAN, 'claims:make')\nSPEC = ({spec},)\n"
    )
    catalog = discover(found)
    assert installed_kernels(catalog) == ()
    (entry,) = catalog.all()
    assert entry.status is Status.FAILED
    assert "claims:make is not the reference of greedy" in entry.reason


def test_plugin_provides_op_and_reference(install: Install, tmp_path: Path) -> None:
    found = install(
        "acme",
        "[tokenspeed.kernels.norm]\nacme = acme_ops:SPEC [api1]\n"
        "[tokenspeed.ops]\nacme = acme_ops:OP [api1]\n",
    )
    (tmp_path / "modules" / "acme_ops.py").write_text(
        "from tokenspeed_core.api import Capability, KernelSpec, OpContract\n"
        "OP = OpContract('acme/norm', 'norm', '', {}, 'acme_ops:make', 'acme_ops:inputs', ())\n"
        "SPEC = KernelSpec('acme/norm', 'acme', Capability(('cpu',), ('float32',)), 'acme_ops:make', reference=True)\n"
    )
    (kernel,) = installed_kernels(discover(found))
    assert kernel.spec.reference


def test_log_escapes_control_characters(
    install: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = install("odd", attention("odd/red", "raising:SPEC [api1]"))
    (tmp_path / "modules" / "raising.py").write_text(
        "raise RuntimeError('\\x1b]0;title\\x07 caf\u00e9')\n"
    )
    installed_kernels(discover(found))
    assert "\x1b" not in caplog.text
    assert "kernels.attention odd/red of odd 1.0 failed to load: Traceback" in caplog.text
    assert "RuntimeError: \\x1b]0;title\\x07 caf\u00e9" in caplog.text


SPECS = """
from tokenspeed_core.api import Capability, KernelSpec
def spec(op): return KernelSpec(op, "acme/ld", Capability(("cpu",), ("float32",)), "specs_of_acme_kernel:make")
UNKNOWN, BOTH, RAISES = spec("greeedy"), (spec("greeedy"), spec("greedy")), spec("greedy")
"""


def write_modules(tmp_path: Path, **modules: str) -> None:
    (tmp_path / "modules").mkdir()
    for name, text in modules.items():
        (tmp_path / "modules" / f"{name}.py").write_text(text)


def test_kernel_of_an_unknown_op_is_ignored(install: Install, tmp_path: Path) -> None:
    write_modules(tmp_path, specs_of_acme=SPECS)
    found = install(
        "acme", "[tokenspeed.kernels.sampling]\nacme/ld = specs_of_acme:UNKNOWN [api1]\n"
    )
    catalog = discover(found)
    assert installed_kernels(catalog) == ()
    assert (
        catalog.all()[0].reason
        == "no installed plugin defines the op greeedy; did you mean greedy?"
    )
    for catalog in (discover(found, "acme"), discover(found, strict=True)):
        with pytest.raises(PluginError, match="no installed plugin defines the op greeedy"):
            installed_kernels(catalog)


def test_other_kernels_of_an_entry_are_kept(install: Install, tmp_path: Path) -> None:
    write_modules(tmp_path, specs_of_acme=SPECS)
    catalog = discover(
        install("acme", "[tokenspeed.kernels.sampling]\nacme/ld = specs_of_acme:BOTH [api1]\n")
    )
    assert "greedy" in {kernel.spec.op for kernel in installed_kernels(catalog)}


def test_required_kernel_that_fails_ends_the_start(install: Install, tmp_path: Path) -> None:
    write_modules(tmp_path, specs_of_acme=SPECS, specs_of_acme_kernel="raise RuntimeError('boom')")
    found = install(
        "acme", "[tokenspeed.kernels.sampling]\nacme/ld = specs_of_acme:RAISES [api1]\n"
    )
    problem = {"vocab_size": 64, "dtype": "float32"}

    def select(catalog: Catalog) -> None:
        override = Override("greedy", ("acme/ld",), "--kernel-backend greedy")
        kernels = installed_kernels(catalog)
        Selector(kernels, PlatformInfo("cpu"), (override,)).select("greedy", problem)

    with pytest.raises(SelectionError, match="it does not load: RuntimeError: boom"):
        select(discover(found))
    line = r"sampling acme/ld of acme 1\.0 failed to load specs_of_acme_kernel:make: RuntimeError: boom"
    for catalog in (discover(found, "acme"), discover(found, strict=True)):
        with pytest.raises(PluginError, match=line):
            select(catalog)
