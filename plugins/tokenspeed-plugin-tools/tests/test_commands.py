"""`tokenspeed plugins` and `tokenspeed env`: output, usage errors and imports."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest
from fake_site import Site
from tokenspeed_plugin_tools.command import SUBCOMMANDS

from tokenspeed_core.cli import main

Refusal = Callable[..., str]
HEAVY = ("torch", "numpy", "uvicorn", "transformers", "pydantic")


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, str]]:
    """Return the records of `plugins list --json` by entry name."""
    assert main(["plugins", "list", "--json", *words]) == 0
    return {record["name"]: record for record in json.loads(capsys.readouterr().out)}


@pytest.mark.parametrize(
    "words", [("plugins", "list"), ("plugins",), ("plugins", "list", "--json")]
)
def test_listing_imports_no_heavy_library(words: tuple[str, ...]) -> None:
    code = (
        "import sys; from tokenspeed_core.cli import main; status = main(sys.argv[1:]);"
        f"print('HEAVY', *(name for name in {HEAVY!r} if name in sys.modules)); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *words], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "HEAVY"
    assert "tokenspeed-kernels" in done.stdout


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_subcommand_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", name, "--help"]) == 0
    assert f"tokenspeed plugins {name}" in capsys.readouterr().out


def test_list_shows_status_and_reason(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.install(
        "acme",
        {
            "policies good": "acme:run [api1]",
            "models Late": "acme:run [api9]",
            "unknown_kind x": "acme:run [api1]",
        },
    )
    info = site.install("broken", {"models X": "broken:X [api1]"})
    (info / "METADATA").unlink()
    records = listed(capsys)
    assert records["good"]["status"] == "ok"
    assert "api 9" in records["Late"]["reason"]
    assert "unknown_kind" in records["x"]["reason"]
    assert str(info) in records["?"]["reason"]
    assert main(["plugins", "list"]) == 0
    table = capsys.readouterr().out
    assert "acme models (Late): needs api 9" in table


def test_list_load_marks_failed_imports(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.install(
        "acme",
        {"policies good": "acme_good:run [api1]", "policies bad": "acme_bad:run [api1]"},
        files={"acme_good.py": "run = print", "acme_bad.py": "import no_such_library"},
    )
    site.install("exits", {"policies end": "acme_end:run [api1]"}, files={"acme_end.py": "exit(3)"})
    site.install(
        "killed",
        {"policies kill": "acme_k:run [api1]"},
        files={"acme_k.py": "import os; os._exit(4)"},
    )
    records = listed(capsys, "--load", "--kind", "policies")
    assert records["good"]["status"] == "ok"
    assert "no_such_library" in records["bad"]["reason"]
    assert records["end"]["status"] == "failed"
    assert "status 4" in records["kill"]["reason"]
    assert "acme_good" not in sys.modules


def test_no_plugins_disables_third_parties(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.install("acme", {"policies good": "acme:run [api1]"})
    records = listed(capsys, "--no-plugins", "--kind", "policies")
    assert records["good"]["status"] == "disabled"
    assert not records["good"]["is_default"]


def test_ops_are_listed_with_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "list", "--ops", "--json"]) == 0
    ops = {op["name"]: op for op in json.loads(capsys.readouterr().out)}
    assert "torch" in ops["rms_norm"]["backends"]
    assert ops["attention"]["from"] == "tokenspeed-core"


def test_info_describes_a_distribution(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    kernel = (
        "from tokenspeed_core.api import Capability, KernelSpec\n"
        "SPEC = KernelSpec('greedy', 'acme', Capability(('cpu',), ('float32',)), 'acme:make',\n"
        "    requires=('no_such_module',), obtain='pip install it')\n"
    )
    site.install("acme", {"kernels.sampling acme": "acme:SPEC [api1]"}, files={"acme.py": kernel})
    assert main(["plugins", "info", "acme", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["provides"][0]["computes"] == ["greedy"]
    assert record["required_modules"] == {
        "no_such_module": {"is_installed": False, "obtain": "pip install it"}
    }
    assert len(record["sha256"]) == 64
    assert main(["plugins", "info", "acme"]) == 0
    assert "missing: pip install it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("lst",), "list"),
        (("frobnicate",), "doctor"),
        (("info", "tokenspeed-kernelz"), "tokenspeed-kernels"),
        (("list", "--kind", "modelz"), "models"),
        (("list", "--ops", "--load"), "--load"),
        (("new", "atention", "acme"), "attention"),
        (("why", "attention", "--platform", "sm0"), "--platform"),
    ],
)
def test_usage_errors_are_one_line_with_a_hint(
    words: tuple[str, ...], named: str, refusal: Refusal
) -> None:
    assert named in refusal("plugins", *words)


def test_errors_are_json_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "info", "no-such-plugin", "--json"]) == 2
    captured = capsys.readouterr()
    assert "no-such-plugin" in json.loads(captured.out)["error"]
    assert "no-such-plugin" in captured.err


def test_env_masks_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKENSPEED_API_KEY", "s3cret")
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["environment"]["TOKENSPEED_API_KEY"] == "***"


def test_plugins_cannot_control_the_terminal(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.install("acme", {"hooks red\x1b]0;title\x07": "acme:run [api1]"})
    assert main(["plugins", "list"]) == 0
    assert "\x1b" not in capsys.readouterr().out
