"""What a start would leave out, and metadata that cannot be read: `list --load`, `info`, `doctor` and `check` tell."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from fake_site import Site
from tokenspeed_plugin_tools import probe

from tokenspeed_core.cli import main

Refusal = Callable[..., str]
POLICY = "POLICY = object\n"


@pytest.fixture(autouse=True)
def _imports_only_what_the_test_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the plugins of this environment unimported, of which each distribution's take a process."""
    ask = probe._ask
    monkeypatch.setattr(
        probe,
        "_ask",
        lambda entries, *rest: (
            {} if entries[0].distribution.startswith("tokenspeed-") else ask(entries, *rest)
        ),
    )


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, Any]]:
    assert main(["plugins", "list", *words, "--json"]) == 0
    return {
        f"{each['distribution']} {each['name']}": each
        for each in json.loads(capsys.readouterr().out)
    }


def diagnosed(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """Return the exit status of doctor, and its findings by distribution."""
    status = main(["plugins", "doctor", "--json"])
    found: dict[str, list[dict[str, Any]]] = {}
    for each in json.loads(capsys.readouterr().out)["findings"]:
        found.setdefault(each["distribution"], []).append(each)
    return status, found


SPECS = """
from tokenspeed_core.api import Capability, KernelSpec, hookimpl
CPU = Capability(("cpu",), ("float32",))
def spec(load="acme_kernel:make", op="greedy", backend="acme/x", **more):
    return KernelSpec(op, backend, CPU, load, **more)
"""


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("kernels.sampling", "A = 'hello'", "'hello' is not a KernelSpec with backend 'acme/x'"),
        (
            "kernels.sampling",
            "A = spec(backend='acme/y')",
            "is not a KernelSpec with backend 'acme/x'",
        ),
        (
            "kernels.sampling",
            "A = spec(op='greeedy')",
            "no installed plugin defines the op greeedy; did you mean greedy?",
        ),
        (
            "kernels.sampling",
            "A = (spec(), spec('acme_raises:make'))",
            "greedy: it does not load: RuntimeError: a b",
        ),
        (
            "kernels.sampling",
            "A = spec(options='acme:CPU')",
            "it does not load: TypeError: acme:CPU is not a pydantic",
        ),
        ("kernels.sampling", "A = spec(options='acme:NONE')", "it does not load: AttributeError: "),
        ("ops", "A = (1, 2)", "1 is no OpContract"),
        ("hooks", "class A: pass", "acme:A is a type, not a module"),
        ("hooks", "import acme_hooks as A", "unknown hook 'observe_nothing'"),
        ("rankings", "A = ()", "only the default distributions have rankings"),
        ("locks", "A = print", "only the default distributions have locks"),
        ("models", "A = 'hello'", "acme:A is a str, not a ModelSpec"),
        ("load_formats", "A = 'hello'", "acme:A is a str, not a LoadFormat"),
        ("tool_parsers", "A = 'hello'", "acme:A is a str, not a ParserSpec"),
        (
            "policies",
            "A = 'hello'",
            "acme:A is 'hello' (of type str), and must be something that is called",
        ),
        (
            "commands",
            "A = 'hello'",
            "acme:A is 'hello' (of type str), and must be something that is called",
        ),
    ],
)
def test_what_a_start_leaves_out_is_found_by_loading_with_what_the_start_says(
    site: Site, capsys: pytest.CaptureFixture[str], kind: str, source: str, reason: str
) -> None:
    files = {
        "acme.py": SPECS + source,
        "acme_kernel.py": "make = print",
        "acme_raises.py": "raise RuntimeError('a\\nb')",
        "acme_hooks.py": "from acme import hookimpl\n@hookimpl\ndef observe_nothing(record): ...\n",
    }
    site.install("acme", {f"{kind} acme/x": "acme:A [api1]"}, files=files)
    (found,) = (
        each
        for each in listed(capsys, "--load", "--kind", kind).values()
        if each["distribution"] == "acme"
    )
    assert found["status"] in ("failed", "incompatible")
    assert reason in found["reason"]
    assert "\n" not in found["reason"]
    assert main(["plugins", "info", "acme"]) == 0
    assert reason in capsys.readouterr().out


def test_what_a_start_takes_is_called_so_by_loading(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    source = (
        f"{SPECS}GOOD = (spec(), spec(op='greeedy'))\n"
        "ELSEWHERE = spec('acme_gone:make', backend='acme/z', requires=('no_such_library',))\n"
    )
    entries = {
        "kernels.sampling acme/x": "acme:GOOD [api1]",
        "kernels.sampling acme/z": "acme:ELSEWHERE [api1]",
    }
    site.install("acme", entries, files={"acme.py": source, "acme_kernel.py": "make = print"})
    found = listed(capsys, "--load", "--kind", "kernels.sampling")
    assert [found[f"acme {name}"]["status"] for name in ("acme/x", "acme/z")] == ["ok", "ok"]


def test_an_entry_whose_kernel_ends_the_process_is_told_and_its_neighbours_are_judged(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    source = SPECS + "A, B = spec(), spec('acme_dies:make', backend='acme/b')\n"
    entries = {
        "kernels.sampling acme/x": "acme:A [api1]",
        "kernels.sampling acme/b": "acme:B [api1]",
    }
    files = {
        "acme.py": source,
        "acme_kernel.py": "make = print",
        "acme_dies.py": "import os\nos._exit(3)\n",
    }
    site.install("acme", entries, files=files)
    found = listed(capsys, "--load", "--kind", "kernels.sampling")
    assert found["acme acme/b"]["reason"].startswith(
        "the import of its kernels ended the process with status 3: "
    )
    assert found["acme acme/x"]["status"] == "ok"


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("METADATA", None, "METADATA is missing or names nothing"),
        ("METADATA", "Metadata-Version: 2.1\nName: odd-value\n", "METADATA names no version"),
        (
            "entry_points.txt",
            "[tokenspeed.policies]\nodd = a b c\n",
            "has a value of another form: odd = a b c",
        ),
    ],
    ids=["no METADATA", "no version", "one malformed value"],
)
def test_a_distribution_whose_metadata_cannot_be_read_has_a_row_that_says_so(
    site: Site,
    capsys: pytest.CaptureFixture[str],
    refusal: Refusal,
    file: str,
    text: str | None,
    why: str,
) -> None:
    info = site.install("odd-value", {"policies odd": "odd:P [api1]"})
    (info / file).unlink() if text is None else (info / file).write_text(text)
    found = listed(capsys)["odd-value ?"]
    assert (found["status"], found["kind"]) == ("failed", "unknown")
    assert found["reason"].startswith(f"its metadata in {info} cannot be read: ")
    assert why in found["reason"]
    assert found["reason"].endswith("`tokenspeed plugins doctor` has what mends it")
    assert main(["plugins", "list"]) == 0
    (row,) = (
        line for line in capsys.readouterr().out.splitlines() if line.startswith("odd-value  ")
    )
    assert "failed" in row.split()
    assert main(["plugins", "info", "odd-value"]) == 0
    assert why in capsys.readouterr().out
    assert refusal("plugins", "check", "odd-value").startswith(
        f"check odd-value: its metadata in {info} cannot be"
    )


def test_what_a_start_refuses_is_found_and_another_version_is_advised(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install("odd", {"policies odd": "odd:P [api1]"}, files={"odd.py": "P = 'calm'\n"})
    monkeypatch.setenv("TOKENSPEED_PLUGINS", "odd")
    status, found = diagnosed(capsys)
    (finding,) = found["odd"]
    assert status == 1
    what = "odd:P is 'calm' (of type str), and must be something that is called"
    assert finding["what"] == f"policies odd cannot be used: {what}"
    assert finding["mend"] == (
        "pip install 'odd!=1.0' for another version, or tell its authors; "
        "TOKENSPEED_PLUGINS=odd,-odd:policies:odd goes without it"
    )


@pytest.mark.parametrize("entry", ["rankings mine", "locks plugins-lock", "commands --help"])
def test_what_only_a_default_distribution_may_bring_and_what_nobody_can_type_is_found(
    site: Site, capsys: pytest.CaptureFixture[str], entry: str
) -> None:
    site.install("odd", {entry: "odd:POLICY [api1]"}, files={"odd.py": POLICY})
    status, found = diagnosed(capsys)
    (finding,) = found["odd"]
    assert status == 1
    assert finding["what"].startswith(f"{entry}: ")
    assert finding["mend"] == "pip uninstall odd, and tell its author"
