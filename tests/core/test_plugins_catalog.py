"""The catalog of plugins: entries from metadata, and errors before any import."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from made_plugins import Install, attention, discover

import tokenspeed_core
from tokenspeed_core.api.kernels import PlatformInfo
from tokenspeed_core.errors import PluginError, SelectionError
from tokenspeed_core.kernels.installed import how_to_get_kernels
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.plugins import Catalog, Selection, Status
from tokenspeed_core.plugins.kinds import KERNELS_PREFIX, KINDS


def test_order_does_not_depend_on_the_disk(install: Install) -> None:
    install("zeta", attention("b") + "a = nowhere:X [api1]\n")
    found = install("Alpha_Kernels", attention("c") + "[tokenspeed.models]\nM = nowhere:Y [api1]\n")
    expected = [("alpha-kernels", "c"), ("alpha-kernels", "M"), ("zeta", "a"), ("zeta", "b")]
    for order in (found, found[::-1]):
        assert [(e.distribution, e.name) for e in discover(order).all()] == expected


def test_discovery_imports_no_plugin(install: Install, tmp_path: Path) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "explosive.py").write_text("raise SystemExit('imported')")
    catalog = discover(install("boom", attention("x", "explosive:SPEC [api1]")))
    assert catalog.names("kernels.attention") == ("x",)
    assert "explosive" not in sys.modules


@pytest.mark.parametrize(
    ("value", "requires", "named"),
    [
        ("m:S [api2]", "", ("api 2", "upgrade tokenspeed-core")),
        ("m:S [api0]", "", ("api 0", "upgrade odd")),
        ("m:S", "", ("[api1]",)),
        ("m:S [api1]", "tokenspeed-core>=0.2", (">=0.2", "0.1.0")),
        ("m:S [api1]", "tokenspeed_core[default] (<0.1)", ("<0.1", "0.1.0")),
    ],
)
def test_incompatible_entry_shows_the_reason(
    install: Install, value: str, requires: str, named: tuple[str, ...]
) -> None:
    (entry,) = discover(install("odd", attention("x", value), requires=requires)).all()
    assert entry.status is Status.INCOMPATIBLE
    assert all(part in entry.reason for part in named)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("METADATA", None),
        ("METADATA", b"Metadata-Version: 2.1\nName: odd\n"),
        ("entry_points.txt", b"[tokenspeed.models]\nx = a b c\n"),
        ("entry_points.txt", b"[tokenspeed.models]\nx = caf\xe9:S [api1]\n"),
    ],
)
def test_unreadable_metadata_hides_only_its_plugin(
    install: Install,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    file: str,
    content: bytes | None,
) -> None:
    install("odd", attention("x"))
    found = install("sound", attention("y"))
    path = tmp_path / "modules" / "odd-1.0.dist-info" / file
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    assert [entry.name for entry in discover(found).all()] == ["y"]
    assert str(path.parent) in caplog.text
    caplog.clear()
    discover(found)
    assert caplog.text == "", "it is logged once"
    with pytest.raises(PluginError) as caught:
        discover(found, strict=True)
    assert str(path.parent) in str(caught.value)
    discover(found, "sound", strict=True)


def test_unknown_kind_gets_a_suggestion(install: Install) -> None:
    (entry,) = discover(install("odd", "[tokenspeed.model]\nx = m:S [api1]\n")).all()
    assert entry.status is Status.INCOMPATIBLE
    assert "did you mean models?" in entry.reason


def test_plugin_may_add_an_op_family(install: Install) -> None:
    kernels = "[tokenspeed.kernels.convolution]\nx = m:S [api1]\n"
    catalog = discover(install("new", f"{kernels}[tokenspeed.ops]\nconvolution = m:O [api1]\n"))
    assert catalog.names("kernels.convolution") == ("x",)


def test_every_kind_is_used() -> None:
    core = Path(tokenspeed_core.__file__).parent
    source = "".join(path.read_text() for path in core.rglob("*.py") if path.name != "kinds.py")
    for name in KINDS:
        if name not in ("reasoning_parsers", "tool_parsers"):  # the server uses these
            assert name.startswith(KERNELS_PREFIX) or f'"{name}"' in source, name


def test_built_in_names_are_reserved(install: Install) -> None:
    catalog = discover(
        install("usurper", "[tokenspeed.policies]\nfcfs = m:P [api1]\nmine = m:P [api1]\n")
    )
    assert [(e.name, e.status) for e in catalog.all()] == [
        ("fcfs", Status.INCOMPATIBLE),
        ("mine", Status.OK),
    ]
    assert catalog.names("policies") == ("fcfs", "mine", "priority")


def test_name_conflict_stops_the_start(install: Install) -> None:
    install("first", attention("x"))
    found = install("second", attention("x"))
    with pytest.raises(PluginError) as caught:
        discover(found)
    message = str(caught.value)
    assert "first 1.0 and second 1.0" in message
    assert "TOKENSPEED_PLUGINS=-second:kernels.attention:x" in message
    listed = discover(found, check=False)
    assert {e.status for e in listed.all()} == {Status.FAILED}
    for settled in ("-second", "-second:kernels.attention:x", "-Second:kernels.attention"):
        assert discover(found, settled).get("kernels.attention", "x").distribution == "first"


def test_third_party_can_take_over_a_default_name(install: Install) -> None:
    install("acme", attention("x"))
    found = install("tokenspeed-kernels", attention("x") + "y = m:S [api1]\n")
    with pytest.raises(PluginError, match=r"TOKENSPEED_PLUGINS=-acme:kernels\.attention:x"):
        discover(found)
    catalog = discover(found, "-tokenspeed-kernels:kernels.attention:x")
    assert catalog.get("kernels.attention", "x").distribution == "acme"
    assert catalog.get("kernels.attention", "y").distribution == "tokenspeed-kernels"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "-acme:kernels.attention:acme/x",
            {"kernels.attention acme/y", "policies acme/x", "models Other"},
        ),
        ("-Acme:kernels.attention", {"policies acme/x", "models Other"}),
        ("-acme:policies,-other", {"kernels.attention acme/x", "kernels.attention acme/y"}),
        ("acme:policies", {"policies acme/x"}),
        ("acme,-acme:kernels.attention:acme/y", {"kernels.attention acme/x", "policies acme/x"}),
    ],
)
def test_parts_of_a_distribution_can_be_selected(
    install: Install, text: str, expected: set[str]
) -> None:
    install("other", "[tokenspeed.models]\nOther = m:S [api1]\n")
    acme = attention("acme/x") + "acme/y = m:S [api1]\n[tokenspeed.policies]\nacme/x = m:P [api1]\n"
    catalog = discover(install("acme", acme), text)
    assert {f"{e.kind} {e.name}" for e in catalog.all() if e.status is Status.OK} == expected


def test_hooks_of_the_same_name_do_not_conflict(install: Install) -> None:
    install("first", "[tokenspeed.hooks]\nhooks = a [api1]\n")
    found = install("second", "[tokenspeed.hooks]\nhooks = b [api1]\n")
    assert len(discover(found).entries("hooks")) == 2


def test_first_copy_on_the_path_is_used(install: Install) -> None:
    install("twice", attention("x"), version="2.0", where="a")
    (entry,) = discover(install("twice", attention("x"), version="1.0", where="b")).all()
    assert (entry.version, entry.status) == ("2.0", Status.OK)


def test_incompatible_plugins_are_logged_at_start(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("sound", attention("a"))
    kernels = attention("b") + "c = m:S [api1]\n"
    found = install(
        "late",
        f"{kernels}[tokenspeed.models]\nM = m:S [api9]\n",
        requires="tokenspeed-core>=0.5,<0.7",
    )
    discover(found, check=False)
    assert caplog.text == ""
    discover(found)
    first, second = (record.getMessage() for record in caplog.records)
    assert "late 1.0" in first
    assert "0.1.0" in first
    assert "api 9" in second
    with pytest.raises(PluginError, match=r"late 1\.0.*TOKENSPEED_PLUGINS=-late"):
        discover(found, strict=True)
    discover(found, "-late", strict=True)


@pytest.mark.parametrize("name", ["--help", "-x", "a b", "a,b", "\x1b[31mred"])
def test_untypable_names_are_refused(install: Install, name: str) -> None:
    entries = (
        f"[tokenspeed.commands]\n{name} = m:run [api1]\n[tokenspeed.hooks]\n{name} = m [api1]\n"
    )
    command, hooks = discover(install("odd", entries)).all()
    assert (command.status, hooks.status) == (Status.INCOMPATIBLE, Status.OK)
    assert command.reason.isprintable()


@pytest.mark.parametrize(
    ("text", "no_plugins", "expected"),
    [
        (None, False, {"tokenspeed-kernels", "tokenspeed-stranger", "other"}),
        (None, True, {"tokenspeed-kernels"}),
        ("", False, {"tokenspeed-kernels"}),
        ("other", False, {"tokenspeed-kernels", "other"}),
        ("-Other", False, {"tokenspeed-kernels", "tokenspeed-stranger"}),
        ("-tokenspeed-kernels", False, {"tokenspeed-stranger", "other"}),
    ],
)
def test_default_distributions_stay_enabled(
    install: Install, text: str | None, no_plugins: bool, expected: set[str]
) -> None:
    install("tokenspeed-kernels", attention("a"))
    install("tokenspeed-stranger", attention("b"))
    catalog = discover(install("other", attention("c")), text, no_plugins=no_plugins)
    assert {e.distribution for e in catalog.entries("kernels.attention")} == expected


@pytest.mark.parametrize(
    ("switch", "text", "only_defaults"),
    [("1", None, True), ("yes", "-other", True), ("maybe", None, True), ("off", None, False)],
)
def test_no_plugins_variable_disables_third_parties(
    install: Install, switch: str, text: str | None, only_defaults: bool
) -> None:
    install("tokenspeed-kernels", attention("a"))
    found = install("other", attention("c"))
    environ = {"TOKENSPEED_NO_PLUGINS": switch}
    if text is not None:
        environ["TOKENSPEED_PLUGINS"] = text
    catalog = Catalog.discover(Selection.read(environ), distributions=found, check=False)
    assert catalog.names("kernels.attention") == (("a",) if only_defaults else ("a", "c"))


def test_missing_kernels_are_explained(install: Install) -> None:
    found = install("tokenspeed-kernels", attention("x"))
    hint = how_to_get_kernels(discover(found, "-tokenspeed-kernels"))
    assert "TOKENSPEED_PLUGINS=-tokenspeed-kernels" in hint
    assert how_to_get_kernels(discover(found)) == ""
    assert how_to_get_kernels(discover([])) == "pip install tokenspeed-kernels"
    selector = Selector((), PlatformInfo("cpu"), hint=hint)
    with pytest.raises(SelectionError, match="TOKENSPEED_PLUGINS=-tokenspeed-kernels"):
        selector.select("greedy", {"vocab_size": 64, "dtype": "float32"})


def test_unknown_name_error_lists_installed_names(install: Install) -> None:
    catalog = discover(install("some", attention("fast") + "slow = m:S [api1]\n"))
    with pytest.raises(PluginError, match=r"fast, slow; did you mean fast\?"):
        catalog.get("kernels.attention", "fasst")
    with pytest.raises(PluginError, match=r"fast, slow.*acme/new"):
        catalog.get("kernels.attention", "acme/new")


def test_processes_compare_their_plugins(install: Install, tmp_path: Path) -> None:
    for where, version in (("a", "1.0"), ("b", "1.0"), ("c", "1.1")):
        install("some", attention("x"), where=where, version=version)
    one, same, other = (
        discover(list(distributions(path=[str(tmp_path / where)]))) for where in "abc"
    )
    same.verify(one.digest())
    with pytest.raises(PluginError, match="different plugins"):
        other.verify(one.digest())


def test_reading_the_catalog_imports_no_tensor_library() -> None:
    code = (
        "import sys; from tokenspeed_core.plugins import Catalog; Catalog.discover();"
        "print(*({'torch', 'numpy', 'pydantic', 'uvicorn'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-P", "-c", code], text=True).strip() == ""
