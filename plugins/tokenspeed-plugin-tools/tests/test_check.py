"""`tokenspeed plugins check` runs the conformance kit on an installed distribution."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_site import Site
from tokenspeed_plugin_tools.check import last_line

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


def test_sound_distribution_passes(checked: Any) -> None:
    status, verdicts = checked("def run(words):\n    return 0\n")
    assert (status, failures(verdicts)) == (0, "")
    assert {each["verdict"] for each in verdicts.values()} == {"ok"}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import tokenspeed_no_such_module\n", "fails to import"),
        pytest.param("def run(:\n", "SyntaxError", marks=pytest.mark.release),
        ("import sys; sys.modules['torch'] = sys; run = print\n", "loads torch"),
        (
            "import time; e = time.process_time() + 0.5\nwhile time.process_time() < e: pass\nrun = print\n",
            "takes 0.",
        ),
    ],
    ids=["import error", "syntax error", "torch at top level", "slow"],
)
def test_bad_import_is_found(checked: Any, source: str, expected: str) -> None:
    status, verdicts = checked(source)
    assert status == 1
    assert expected in failures(verdicts)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"value": "acme:run"}, "[api1]"),
        ({"value": "acme:run [api7]"}, "needs api 7"),
        pytest.param({"requires": ""}, "declares no range", marks=pytest.mark.release),
        pytest.param(
            {"requires": "tokenspeed-core>=99"},
            "needs tokenspeed-core >=99",
            marks=pytest.mark.release,
        ),
        ({"group": "comands"}, "did you mean commands?"),
    ],
)
def test_invalid_metadata_is_reported(checked: Any, wrong: dict[str, str], expected: str) -> None:
    status, verdicts = checked("run = print\n", **wrong)
    assert status == 1
    assert expected in failures(verdicts)


def test_kernel_of_an_unknown_op_fails(
    checked: Any,
) -> None:
    source = (
        "from tokenspeed_core.api import Capability, KernelSpec\n"
        "A = KernelSpec('greeedy', 'acme', Capability(('cpu',), ('float32',)), 'json:loads')\n"
    )
    status, verdicts = checked(source, group="kernels.sampling", value="acme:A [api1]")
    assert status == 1
    assert "did you mean greedy?" in failures(verdicts)


def test_unknown_distribution_is_refused(refusal: Callable[..., str]) -> None:
    near = refusal("plugins", "check", "tokenspeed-plugin-tool")
    assert "did you mean tokenspeed-plugin-tools?" in near
    assert "installed: " in refusal("plugins", "check", "typer")


def test_unknown_library_is_refused(refusal: Callable[..., str]) -> None:
    words = ("plugins", "check", "tokenspeed-plugin-tools", "--against")
    assert "choose transformers" in refusal(*words, "vllm")


def test_plugin_that_ends_the_process_fails(checked: Any) -> None:
    source = (
        "import os, sys\nif 'tokenspeed_testing.report' in sys.modules: os._exit(3)\nrun = print\n"
    )
    status, verdicts = checked(source)
    assert status == 1
    assert "the process died in this test" in failures(verdicts)


KERNEL = """
from tokenspeed_core.api import Capability, KernelSpec
CAPABILITY = Capability(("cuda",), ("float32", "bfloat16"), (42, 0), (42, 1))
SPEC = KernelSpec("greedy", "acme", CAPABILITY, "acme_kernel:make")
"""


def test_skipped_cases_are_counted(
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
    assert last_line(report).startswith(
        f"acme: passed, {left['num_cells']} cases need a device sm420 to sm421 ("
    )


def test_complete_run_is_reported(
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


def test_broken_model_fails(family: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    with (family / "model.py").open("a") as model:
        model.write(
            "\n\ndef _broken(self, *words, **options):\n    raise ArithmeticError('a broken forward')\n"
        )
        model.write("\n\nAcmeForCausalLM.forward = _broken\n")
    assert main(["plugins", "check", "acme-model", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    failed = [each for each in report["verdicts"] if each["verdict"] == "failed"]
    assert [each["subject"] for each in failed] == ["models AcmeForCausalLM"]
    assert "a broken forward" in failed[0]["detail"]


@pytest.mark.parametrize(
    "missing", ["the file", pytest.param("the architecture", marks=pytest.mark.release)]
)
def test_model_without_example_is_skipped(
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
            "needs": "acme_model/example/config.json, a small configuration for AcmeForCausalLM",
        }
    ]


@pytest.mark.release
def test_each_model_has_its_own_example(family: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    (family / "example" / "second").mkdir()
    (family / "example" / "config.json").rename(family / "example" / "second" / "config.json")
    assert main(["plugins", "check", "acme-model", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["is_complete"]
    assert sum(each["subject"] == "models AcmeForCausalLM" for each in report["verdicts"]) == 3


@pytest.mark.parametrize(
    "kind",
    [
        "tool_parsers",
        *(
            pytest.param(kind, marks=pytest.mark.release)
            for kind in ("kernels.sampling", "ops", "policies", "hooks")
        ),
    ],
)
def test_descriptor_of_the_wrong_type_fails(checked: Any, kind: str) -> None:
    status, verdicts = checked("X = 1\n", group=kind, value="acme:X [api1]")
    assert status == 1
    assert verdicts["entries load"]["verdict"] == "failed"
    assert failures(verdicts).startswith(f"{kind} acme: ")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param("()", "() is not a KernelSpec", marks=pytest.mark.release),
        ("(1,)", "1 is not a KernelSpec"),
        pytest.param(
            "None", "acme:X is of type NoneType, expected object", marks=pytest.mark.release
        ),
    ],
)
def test_invalid_kernel_in_a_tuple_fails(checked: Any, value: str, expected: str) -> None:
    status, verdicts = checked(f"X = {value}\n", group="kernels.attention", value="acme:X [api1]")
    assert status == 1
    assert expected in verdicts["entries load"]["detail"]
