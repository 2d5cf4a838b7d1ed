"""The catalog of plugins: what metadata says, and what is refused before anything is imported."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from made_plugins import Install, attention, discover

import tokenspeed_core
from tokenspeed_core.api.kernels import PlatformInfo
from tokenspeed_core.api.ops import common_ops
from tokenspeed_core.errors import PluginError, SelectionError
from tokenspeed_core.kernels.installed import how_to_get_kernels
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.plugins import Catalog, Selection, Status
from tokenspeed_core.plugins.kinds import KERNELS_PREFIX, KINDS


def test_entries_come_by_distribution_then_kind_then_name_whatever_the_order_on_disk(
    install: Install,
) -> None:
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
    ("value", "requires", "reason"),
    [
        (
            "m:S [api2]",
            "",
            "needs api 2 of kernels.attention, this core has 1: upgrade tokenspeed-core",
        ),
        ("m:S [api0]", "", "needs api 0 of kernels.attention, this core has 1: upgrade odd"),
        ("m:S", "", "names no api; its author writes `m:S [api1]`"),
        ("m:S [api1]", "tokenspeed-core>=0.2", "needs tokenspeed-core >=0.2, this is 0.1.0"),
        (
            "m:S [api1]",
            "tokenspeed_core[default] (<0.1)",
            "needs tokenspeed-core <0.1, this is 0.1.0",
        ),
    ],
)
def test_an_entry_that_does_not_fit_is_incompatible_before_any_import(
    install: Install, value: str, requires: str, reason: str
) -> None:
    (entry,) = discover(install("odd", attention("x", value), requires=requires)).all()
    assert (entry.status, entry.reason) == (Status.INCOMPATIBLE, reason)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("METADATA", None),
        ("METADATA", "Metadata-Version: 2.1\nName: odd\n"),
        ("direct_url.json", "{nonsense"),
        ("entry_points.txt", "[tokenspeed.models]\nx = a b c\n"),
        ("entry_points.txt", "[tokenspeed.models]\nx\n"),
    ],
)
def test_one_distribution_whose_metadata_is_broken_hides_no_other(
    install: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, text: str | None
) -> None:
    install("odd", attention("x"))
    found = install("sound", attention("y"))
    path = tmp_path / "modules" / "odd-1.0.dist-info" / file
    path.unlink() if text is None else path.write_text(text)
    assert [entry.name for entry in discover(found).all()] == ["y"]
    assert f"{path.parent} cannot be read" in caplog.text
    assert "tokenspeed plugins doctor" in caplog.text
    caplog.clear()
    discover(found)
    assert caplog.text == "", "it is said once"


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        (
            "METADATA",
            b"Metadata-Version: 2.1\nName: odd\n",
            "ValueError: METADATA lacks a name or a version",
        ),
        ("entry_points.txt", b"[tokenspeed.models]\nx = a b c\n", "AttributeError: "),
        (
            "entry_points.txt",
            b"[tokenspeed.models]\nx = caf\xe9:S [api1]\n",
            "UnicodeDecodeError: ",
        ),
    ],
)
def test_metadata_that_cannot_be_read_ends_a_strict_start_unless_it_is_of_what_is_left_out(
    install: Install,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    content: bytes,
    why: str,
) -> None:
    install("odd", attention("x"))
    found = install("sound", attention("y"))
    folder = tmp_path / "modules" / "odd-1.0.dist-info"
    (folder / file).write_bytes(content)
    with pytest.raises(PluginError) as caught:
        discover(found, strict=True)
    said = str(caught.value)
    assert said.startswith(f"{folder} cannot be read: {why}")
    assert said.endswith(
        "; --strict-plugins ends the start for it; remove that folder, then install odd again"
    )
    assert "\n" not in said
    listing = discover(found, strict=True, check=False)
    without = [discover(found, strict=True, no_plugins=True), discover(found, "sound", strict=True)]
    monkeypatch.chdir(folder.parent)  # of which nothing would be used
    for catalog in (listing, *without, discover(found, strict=True)):
        assert [entry.name for entry in catalog.all()] == ["y"]


def test_a_kind_nobody_knows_is_shown_with_the_nearest_one(install: Install) -> None:
    (entry,) = discover(install("odd", "[tokenspeed.model]\nx = m:S [api1]\n")).all()
    assert entry.status is Status.INCOMPATIBLE
    assert "did its author mean models?" in entry.reason


def test_a_plugin_may_bring_an_op_family_that_the_core_has_never_heard_of(install: Install) -> None:
    kernels = "[tokenspeed.kernels.convolution]\nx = m:S [api1]\n"
    catalog = discover(install("new", f"{kernels}[tokenspeed.ops]\nconvolution = m:O [api1]\n"))
    assert catalog.names("kernels.convolution") == ("x",)


@pytest.mark.parametrize("kind", ["platforms", "tokenizers", "kernels.comm", "kernels.convolution"])
def test_a_plugin_that_would_have_no_effect_is_shown_as_unused_and_cannot_be_had(
    install: Install, kind: str
) -> None:
    catalog = discover(install("early", f"[tokenspeed.{kind}]\nx = m:S [api1]\n{attention('y')}"))
    assert [(e.name, e.status) for e in catalog.all() if e.kind == kind] == [("x", Status.UNUSED)]
    assert catalog.entries(kind) == ()
    with pytest.raises(
        PluginError, match="unused: this core does not use plugins of this kind yet"
    ):
        catalog.get(kind, "x")
    assert catalog.get("kernels.attention", "y").status is Status.OK


def test_every_kind_that_is_called_used_is_asked_for_somewhere_in_the_core() -> None:
    core = Path(tokenspeed_core.__file__).parent
    source = "".join(path.read_text() for path in core.rglob("*.py") if path.name != "kinds.py")
    for name, kind in KINDS.items():
        if not name.startswith(KERNELS_PREFIX):
            assert kind.is_used == any(
                f'{ask}("{name}"' in source for ask in ("entries", "names", "get")
            ), name
    families = {f"{KERNELS_PREFIX}{contract.family}" for contract in common_ops().values()}
    assert families == {
        name for name, kind in KINDS.items() if name.startswith(KERNELS_PREFIX) and kind.is_used
    }


def test_a_name_that_is_built_in_is_not_a_plugins_to_take(install: Install) -> None:
    catalog = discover(
        install("usurper", "[tokenspeed.policies]\nfcfs = m:P [api1]\nmine = m:P [api1]\n")
    )
    assert [(e.name, e.status) for e in catalog.all()] == [
        ("fcfs", Status.INCOMPATIBLE),
        ("mine", Status.OK),
    ]
    assert catalog.names("policies") == ("fcfs", "mine", "priority")
    assert "the name fcfs is built in" in catalog.all()[0].reason


def test_a_name_claimed_twice_stops_the_start_and_names_both_and_the_line_that_settles_it(
    install: Install,
) -> None:
    install("first", attention("x"))
    found = install("second", attention("x"))
    with pytest.raises(PluginError) as caught:
        discover(found)
    text = str(caught.value)
    assert "kernels.attention x is claimed by first 1.0 and second 1.0" in text
    assert "TOKENSPEED_PLUGINS=-second:kernels.attention:x leaves out that of second" in text
    assert "pip uninstall second" in text
    listed = discover(found, check=False)
    assert {e.status for e in listed.all()} == {Status.FAILED}
    for settled in ("-second", "-second:kernels.attention:x", "-Second:kernels.attention"):
        assert discover(found, settled).get("kernels.attention", "x").distribution == "first"


@pytest.mark.parametrize(
    "text", [None, "-other", "first,second,third", "first,second,third,other,-other:models"]
)
def test_the_line_that_settles_a_name_claimed_by_three_settles_it_at_once_and_keeps_what_is_set(
    install: Install, text: str | None
) -> None:
    install("other", "[tokenspeed.models]\nM = m:S [api1]\n[tokenspeed.policies]\np = m:P [api1]\n")
    install("first", attention("x"))
    install("second", attention("x") + "y = m:S [api1]\n")
    found = install("third", attention("x"))
    before = {e: e.status for e in discover(found, text, check=False).all() if e.name != "x"}
    with pytest.raises(PluginError) as caught:
        discover(found, text)
    said = str(caught.value)
    assert (
        "x is claimed by first 1.0 and second 1.0 and third 1.0; `pip uninstall second third` or "
        in said
    )
    assert said.endswith(" leaves out that of second and third")
    (settled,) = re.findall(r"TOKENSPEED_PLUGINS=(\S+)", said)
    catalog = discover(found, settled)
    assert catalog.get("kernels.attention", "x").distribution == "first"
    after = {(e.kind, e.name): e.status for e in catalog.all() if e.name != "x"}
    assert after == {(e.kind, e.name): status for e, status in before.items()}


@pytest.mark.parametrize("text", [None, "-other", "acme", "acme,other"])
def test_the_line_that_goes_without_what_fails_keeps_what_is_set(
    install: Install, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    install("other", "[tokenspeed.models]\nM = m:S [api1]\n")
    found = install("acme", attention("x", "no_such_module:S [api1]"))
    if text is None:
        monkeypatch.delenv("TOKENSPEED_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("TOKENSPEED_PLUGINS", text)
    before = discover(found, text)
    with pytest.raises(PluginError, match="`pip uninstall acme` or ") as caught:
        before.need(before.get("kernels.attention", "x"), object)
    (settled,) = re.findall(r"TOKENSPEED_PLUGINS=(\S+) goes without it", str(caught.value))
    after = discover(found, settled)
    assert after.names("kernels.attention") == ()
    assert after.names("models") == before.names("models")


def test_a_name_of_a_default_distribution_is_another_plugins_only_where_the_user_gives_it_away(
    install: Install,
) -> None:
    install("acme", attention("x"))
    found = install("tokenspeed-kernels", attention("x") + "y = m:S [api1]\n")
    with pytest.raises(
        PluginError, match=r"TOKENSPEED_PLUGINS=-acme:kernels\.attention:x leaves out that of acme$"
    ):
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
def test_one_plugin_or_one_kind_of_a_distribution_is_left_out_or_kept_by_name(
    install: Install, text: str, expected: set[str]
) -> None:
    install("other", "[tokenspeed.models]\nOther = m:S [api1]\n")
    acme = attention("acme/x") + "acme/y = m:S [api1]\n[tokenspeed.policies]\nacme/x = m:P [api1]\n"
    catalog = discover(install("acme", acme), text)
    assert {f"{e.kind} {e.name}" for e in catalog.all() if e.status is Status.OK} == expected
    assert all(
        e.reason.startswith("left out by TOKENSPEED_PLUGINS=") for e in catalog.all() if e.reason
    )


def test_hooks_of_the_same_name_do_not_clash(install: Install) -> None:
    install("first", "[tokenspeed.hooks]\nhooks = a [api1]\n")
    assert (
        len(discover(install("second", "[tokenspeed.hooks]\nhooks = b [api1]\n")).entries("hooks"))
        == 2
    )


def test_a_second_copy_of_one_distribution_is_no_clash(install: Install) -> None:
    install("twice", attention("x"), where="a")
    assert len(discover(install("twice", attention("x"), where="b")).all()) == 1


def test_an_older_copy_later_on_the_path_is_shadowed(install: Install) -> None:
    install("twice", attention("x"), version="2.0", where="a")
    current, old = discover(install("twice", attention("x"), version="1.0", where="b")).all()
    assert (current.version, current.status) == ("2.0", Status.OK)
    assert (old.version, old.status) == ("1.0", Status.SHADOWED)
    assert old.reason == "twice 2.0 comes first on sys.path"


def test_what_does_not_fit_is_named_when_a_program_starts_and_ends_a_strict_start(
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
    assert caplog.text == "", "what only lists shows it in its list"
    discover(found)
    why = "needs tokenspeed-core <0.7,>=0.5, this is 0.1.0"
    assert [record.getMessage() for record in caplog.records] == [
        f"plugins of late 1.0 are left out: {why}",
        "plugins of late 1.0 are left out: needs api 9 of models, this core has 1: upgrade tokenspeed-core",
    ]
    with pytest.raises(
        PluginError, match=rf"c of late 1\.0 is incompatible: {why}; `pip uninstall late` or "
    ):
        discover(found, strict=True)
    discover(found, "-late", strict=True)
    found = install("policy", "[tokenspeed.policies]\np = m:P [api9]\n")
    with pytest.raises(
        PluginError, match="`pip uninstall policy` or TOKENSPEED_PLUGINS=-policy goes without it"
    ):
        discover(found, "-late", strict=True)


def test_advice_where_no_kernel_fits_names_the_copy_that_hides_another(install: Install) -> None:
    install("tokenspeed-kernels", attention("x"), version="9.0", where="a")
    found = install(
        "tokenspeed-kernels", attention("x") + "y = m:S [api1]\n", version="1.0", where="b"
    )
    expected = "tokenspeed-kernels is installed, but tokenspeed-kernels 9.0 comes first on sys.path"
    assert how_to_get_kernels(discover(found, strict=True)) == expected
    with pytest.raises(SelectionError, match=f"unknown op 'linear'.*{expected}"):
        Selector((), PlatformInfo("cpu"), hint=expected).select("linear", {})


@pytest.mark.parametrize("name", ["--help", "-x", "a b", "a,b", "\x1b[31mred"])
def test_a_name_that_nobody_can_type_is_refused_but_not_of_what_is_never_typed(
    install: Install, name: str
) -> None:
    entries = (
        f"[tokenspeed.commands]\n{name} = m:run [api1]\n[tokenspeed.hooks]\n{name} = m [api1]\n"
    )
    command, hooks = discover(install("odd", entries)).all()
    assert (command.status, hooks.status) == (Status.INCOMPATIBLE, Status.OK)
    assert (
        command.reason
        == f"the name {name!r} is none that a user can type; its author must choose another"
    )
    assert command.reason.isprintable()


@pytest.mark.parametrize(
    ("word", "text", "only_defaults"),
    [
        ("1", None, True),
        ("True", "other", True),
        ("yes", "-other", True),
        ("0", None, False),
        ("off", None, False),
        ("", None, False),
        ("maybe", None, True),
    ],
)
def test_a_variable_leaves_out_all_but_the_default_ones_for_whatever_runs(
    install: Install, word: str, text: str | None, only_defaults: bool
) -> None:
    install("tokenspeed-kernels", attention("a"))
    found = install("other", attention("c"))
    environ = {"TOKENSPEED_NO_PLUGINS": word} | (
        {} if text is None else {"TOKENSPEED_PLUGINS": text}
    )
    catalog = Catalog.discover(Selection.read(environ), distributions=found, check=False)
    assert catalog.names("kernels.attention") == (("a",) if only_defaults else ("a", "c"))
    if only_defaults and text is None:
        assert catalog.all()[0].reason == f"left out by TOKENSPEED_NO_PLUGINS={word}"


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
def test_the_default_ones_stay_and_strangers_are_judged_by_exact_name(
    install: Install, text: str | None, no_plugins: bool, expected: set[str]
) -> None:
    install("tokenspeed-kernels", attention("a"))
    install("tokenspeed-stranger", attention("b"))
    catalog = discover(install("other", attention("c")), text, no_plugins=no_plugins)
    assert {e.distribution for e in catalog.entries("kernels.attention")} == expected


def test_advice_where_no_kernel_fits_is_of_what_is_left_out_or_missing(install: Install) -> None:
    found = install("tokenspeed-kernels", attention("x"))
    left_out = discover(found, "-tokenspeed-kernels")
    expected = (
        "tokenspeed-kernels is installed, but left out by TOKENSPEED_PLUGINS=-tokenspeed-kernels"
    )
    assert how_to_get_kernels(left_out) == expected
    assert how_to_get_kernels(discover(found)) == ""
    assert how_to_get_kernels(discover([])) == "pip install tokenspeed-kernels"
    selector = Selector((), PlatformInfo("cpu"), hint=expected)
    with pytest.raises(SelectionError, match=f"none; {expected}$"):
        selector.select("greedy", {"vocab_size": 64, "dtype": "float32"})


def test_a_selection_that_names_nobody_is_refused_with_the_nearest_name(install: Install) -> None:
    found = install("other", attention("c"))
    with pytest.raises(
        PluginError, match=r"names othre, which provides no plugin here; did you mean other\?$"
    ):
        discover(found, "othre")
    with pytest.raises(PluginError, match=r"did you mean other:kernels\.attention:c\?$"):
        discover(found, "-other:kernels.atention:c")
    with pytest.raises(
        PluginError, match=r"names zzz, which provides no plugin here; installed: other$"
    ):
        discover(found, "zzz")


def test_an_unknown_name_is_answered_with_what_there_is(install: Install) -> None:
    catalog = discover(install("some", attention("fast") + "slow = m:S [api1]\n"))
    with pytest.raises(PluginError, match=r"installed: fast, slow; did you mean fast\?"):
        catalog.get("kernels.attention", "fasst")
    with pytest.raises(
        PluginError,
        match=r"installed: fast, slow; pip install the distribution that brings acme/new$",
    ):
        catalog.get("kernels.attention", "acme/new")


def test_processes_agree_by_digest_and_a_change_of_version_is_noticed(
    install: Install, tmp_path: Path
) -> None:
    for where, version in (("a", "1.0"), ("b", "1.0"), ("c", "1.1")):
        install("some", attention("x"), where=where, version=version)
    one, same, other = (
        discover(list(distributions(path=[str(tmp_path / where)]))) for where in "abc"
    )
    same.verify(one.digest())
    with pytest.raises(PluginError, match="other plugins than the launcher"):
        other.verify(one.digest())


def test_reading_the_catalog_imports_no_tensor_library() -> None:
    code = (
        "import sys; from tokenspeed_core.plugins import Catalog; Catalog.discover(check=False);"
        "print(*({'torch', 'numpy', 'pydantic', 'uvicorn'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == ""
