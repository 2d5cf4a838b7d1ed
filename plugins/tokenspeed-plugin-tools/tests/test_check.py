"""`tokenspeed plugins check` tells what is wrong with a distribution, each question apart, whatever the plugin does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_site import Site

from tokenspeed_core.cli import main

pytestmark = pytest.mark.slow

CORE = "tokenspeed-core>=0.1"


@pytest.fixture
def checked(site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Install a distribution, check it, and return the status and the verdicts by question."""
    monkeypatch.setenv("PYTHONPATH", str(site.path))

    def check(
        source: str,
        *,
        requires: str = CORE,
        group: str = "commands",
        value: str = "acme:run [api1]",
    ) -> Any:
        site.install("acme", {f"{group} acme": value}, requires=requires, files={"acme.py": source})
        status = main(["plugins", "check", "acme", "--json"])
        report = json.loads(capsys.readouterr().out)
        return status, {each["question"]: each for each in report["verdicts"]}

    return check


def failures(verdicts: dict[str, Any]) -> str:
    return "\n".join(
        each["detail"] for each in verdicts.values() if each["verdict"] not in ("ok", "skipped")
    )


def test_a_sound_distribution_passes(checked: Any) -> None:
    status, verdicts = checked("def run(words):\n    return 0\n")
    assert (status, failures(verdicts)) == (0, "")
    assert {each["verdict"] for each in verdicts.values()} == {"ok"}


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import tokenspeed_no_such_module\n", "fails to import"),
        ("def run(:\n", "SyntaxError"),
        ("import sys; sys.modules['torch'] = sys; run = print\n", "loads torch"),
        (
            "import time; e = time.process_time() + 0.5\nwhile time.process_time() < e: pass\nrun = print\n",
            "takes 0.",
        ),
    ],
    ids=["import error", "syntax error", "torch at top level", "slow"],
)
def test_a_module_that_must_not_be_imported_so_is_found(
    checked: Any, source: str, said: str
) -> None:
    status, verdicts = checked(source)
    assert status == 1
    assert said in failures(verdicts)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"value": "acme:run"}, "names no api"),
        ({"value": "acme:run [api7]"}, "needs api 7"),
        ({"requires": ""}, "says no range"),
        ({"requires": "tokenspeed-core>=99"}, "needs tokenspeed-core >=99"),
        ({"group": "comands"}, "did its author mean commands?"),
    ],
)
def test_metadata_that_does_not_fit_is_found(
    checked: Any, wrong: dict[str, str], said: str
) -> None:
    status, verdicts = checked("run = print\n", **wrong)
    assert status == 1
    assert said in failures(verdicts)


def test_a_kernel_of_an_op_that_nobody_has_fails_where_it_is_loaded_and_is_asked_nothing_more(
    checked: Any,
) -> None:
    source = (
        "from tokenspeed_core.api import Capability, KernelSpec\n"
        "A = KernelSpec('greeedy', 'acme', Capability(('cpu',), ('float32',)), 'json:loads')\n"
    )
    status, verdicts = checked(source, group="kernels.sampling", value="acme:A [api1]")
    assert status == 1
    assert (
        failures(verdicts)
        == "kernels.sampling acme: no installed plugin defines the op greeedy; did you mean greedy?"
    )


def test_what_offers_no_plugin_is_refused_with_the_nearest_name(
    refusal: Callable[..., str],
) -> None:
    said = "no installed distribution of that name provides plugins; "
    assert refusal("plugins", "check", "tokenspeed-plugin-tool") == (
        f"check tokenspeed-plugin-tool: {said}did you mean tokenspeed-plugin-tools?"
    )
    assert refusal("plugins", "check", "typer").startswith(f"check typer: {said}installed: ")


def test_a_plugin_that_ends_the_process_is_a_verdict(checked: Any) -> None:
    source = (
        "import os, sys\nif 'tokenspeed_testing.report' in sys.modules: os._exit(3)\nrun = print\n"
    )
    status, verdicts = checked(source)
    assert status == 1
    assert "the process died in this question" in failures(verdicts)


KERNEL = """
from tokenspeed_core.api import Capability, KernelSpec
CAPABILITY = Capability(("cuda",), ("float32", "bfloat16"), (42, 0), (42, 1))
SPEC = KernelSpec("greedy", "acme", CAPABILITY, "acme_kernel:make")
"""


def test_cells_that_were_not_run_are_counted_with_what_they_need_and_are_no_failure(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("PYTHONPATH", str(site.path))
    site.install(
        "acme",
        {"kernels.sampling acme": "acme:SPEC [api1]"},
        requires=CORE,
        files={"acme.py": KERNEL},
    )
    assert main(["plugins", "check", "acme", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["passed"], report["is_complete"]) == (True, False)
    (left,) = report["not_run"]
    assert left == {
        "subject": "kernels.sampling acme: greedy",
        "num_cells": left["num_cells"],
        "needs": "a device sm420 to sm421",
    }
    assert left["num_cells"] > 1
    assert main(["plugins", "check", "acme"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(
        f"acme: passed, {left['num_cells']} cells need a device sm420 to sm421 ("
    )


def test_a_distribution_of_which_all_was_run_is_complete(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(site.path))
    site.install(
        "acme",
        {"commands acme": "acme:run [api1]"},
        requires=CORE,
        files={"acme.py": "run = print\n"},
    )
    assert main(["plugins", "check", "acme", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["is_complete"], report["not_run"]) == (True, [])
    assert main(["plugins", "check", "acme"]) == 0
    num = len(report["verdicts"])
    assert (
        capsys.readouterr().out.splitlines()[-1] == f"acme: passed ({num} ok, 0 failed, 0 skipped)"
    )


@pytest.fixture
def family(site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Write the family that `plugins new` writes, install it, and return its package."""
    pytest.importorskip("tokenspeed_models")
    assert main(["plugins", "new", "model", "acme", "--path", str(tmp_path / "made")]) == 0
    monkeypatch.setenv("PYTHONPATH", str(site.path))
    site.install(
        "acme-model", {"models AcmeForCausalLM": "acme_model:ACME_MODEL [api1]"}, requires=CORE
    )
    return (tmp_path / "made" / "acme_model").rename(site.path / "acme_model")


def test_a_family_whose_forward_is_broken_fails(
    family: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    with (family / "model.py").open("a") as model:
        model.write(
            "\n\ndef _broken(self, *words, **options):\n    raise ArithmeticError('a broken forward')\n"
        )
        model.write("\n\nFamily.forward = _broken\n")
    assert main(["plugins", "check", "acme-model", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    failed = [each for each in report["verdicts"] if each["verdict"] == "failed"]
    assert [each["subject"] for each in failed] == ["models AcmeForCausalLM"]
    assert "a broken forward" in failed[0]["detail"]


@pytest.mark.parametrize("missing", ["the file", "the architecture"])
def test_a_family_without_an_example_was_not_asked_and_its_author_reads_what_to_add(
    family: Path, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    capsys.readouterr()
    example = family / "example" / "config.json"
    if missing == "the file":
        example.unlink()
    else:
        example.write_text(example.read_text().replace("AcmeForCausalLM", "OtherForCausalLM"))
    assert main(["plugins", "check", "acme-model", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["passed"], report["is_complete"]) == (True, False)
    assert report["not_run"] == [
        {
            "subject": "models AcmeForCausalLM",
            "num_cells": 3,
            "needs": "acme_model/example/config.json, a small configuration whose architectures name AcmeForCausalLM",
        }
    ]


def test_of_several_families_in_a_package_each_has_its_own_example(
    family: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    (family / "example" / "second").mkdir()
    (family / "example" / "config.json").rename(family / "example" / "second" / "config.json")
    assert main(["plugins", "check", "acme-model", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["is_complete"]
    assert sum(each["subject"] == "models AcmeForCausalLM" for each in report["verdicts"]) == 3


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("kernels.sampling", "1 is not a KernelSpec with backend 'acme'"),
        ("ops", "1 is no OpContract"),
        ("policies", "acme:X is 1 (of type int), and must be something that is called"),
        ("commands", "acme:X is 1 (of type int), and must be something that is called"),
        ("tool_parsers", "acme:X is a int, not a ParserSpec"),
        ("reasoning_parsers", "a int, not a ParserSpec"),
        ("models", "acme:X is a int, not a ModelSpec"),
        ("load_formats", "acme:X is a int, not a LoadFormat"),
        ("quantization", "acme:X is a int, not a Quantization"),
        ("checkpoints", "acme:X is a int, not a Checkpoint"),
        ("hooks", "acme:X is a int, not a module"),
    ],
)
def test_a_descriptor_of_the_wrong_type_fails_with_what_was_found_and_what_is_needed(
    checked: Any, kind: str, said: str
) -> None:
    status, verdicts = checked("X = 1\n", group=kind, value="acme:X [api1]")
    assert status == 1
    assert verdicts["entries load"]["verdict"] == "failed"
    assert failures(verdicts).startswith(f"{kind} acme: ")
    assert said in failures(verdicts)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("()", "() is not a KernelSpec"),
        ("(1,)", "1 is not a KernelSpec"),
        ("None", "acme:X is a NoneType, not a object"),
    ],
)
def test_among_several_kernels_each_must_be_one(checked: Any, value: str, said: str) -> None:
    status, verdicts = checked(f"X = {value}\n", group="kernels.attention", value="acme:X [api1]")
    assert status == 1
    assert said in verdicts["entries load"]["detail"]
