"""Packages made by `tokenspeed plugins new` install, pass their tests and serve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenspeed_core.cli import main

KINDS = (
    "attention",
    "moe",
    "linear",
    "sampling",
    "model",
    "quantization",
    "tool-parser",
    "reasoning-parser",
    "policy",
    "command",
)
PIP = ("-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation")
GENERATE = """
import json, sys
from tokenspeed_core import LLM, SamplingParams
from tokenspeed_testing.explain import backends
settings = json.loads(sys.argv[1])
with LLM(device="cpu", max_model_len=64, **settings) as llm:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (out,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params)
    print(json.dumps([out.outputs[0].token_ids, {f: list(b) for f, b in backends(llm.kernel_plan).items()}]))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a package of each kind and install all of them into the folder `site`."""
    folder = tmp_path_factory.mktemp("made")
    for kind in KINDS:
        assert main(["plugins", "new", kind, "acme", "--path", str(folder / kind)]) == 0
    subprocess.run(
        [
            sys.executable,
            "-P",
            *PIP,
            "--target",
            str(folder / "site"),
            *(str(folder / kind) for kind in KINDS),
        ],
        check=True,
    )
    return folder


@pytest.fixture(scope="module")
def run(made: Path) -> Callable[..., str]:
    """Return a function that runs Python with the packages, outside this repository, and returns its stdout."""

    def run(*words: str) -> str:
        environ = {**os.environ, "PYTHONPATH": str(made / "site"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-P", *words], cwd=made, env=environ, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.release
def test_tests_of_each_package_pass(made: Path, run: Callable[..., str]) -> None:
    output = run(
        "-m", "pytest", "-q", "--import-mode=importlib", *(f"{kind}/tests" for kind in KINDS)
    )
    assert "failed" not in output
    assert " passed" in output


@pytest.mark.release
def test_each_package_passes_the_conformance_kit(run: Callable[..., str]) -> None:
    for kind in KINDS:
        report = json.loads(
            run("-m", "tokenspeed_core.cli", "plugins", "check", f"acme-{kind}", "--json")
        )
        assert report["passed"], report
        assert len(report["verdicts"]) > (4 if kind in ("command", "quantization") else 5)


@pytest.mark.parametrize(
    ("family", "backend", "settings"),
    [
        (
            "attention",
            "acme/attention",
            {
                "attention_backend": "acme/attention",
                "schedule_policy": "acme/policy",
                "model": "model/acme_model/example",
            },
        ),
        pytest.param(
            "linear",
            "acme/linear",
            {"kernel_backend": {"linear": ["acme/linear", "auto"]}},
            marks=pytest.mark.release,
        ),
        pytest.param(
            "sampling",
            "acme/sampling",
            {"sampling_backend": "acme/sampling"},
            marks=pytest.mark.release,
        ),
        pytest.param(
            "linear", "torch", {"quantization": "acme/quantization"}, marks=pytest.mark.release
        ),
        pytest.param(
            "moe",
            "acme/moe",
            {"moe_backend": "acme/moe", "model": "moe/acme_moe/example"},
            marks=pytest.mark.release,
        ),
    ],
    ids=["attention, policy and model", "linear", "sampling", "quantization", "moe"],
)
def test_each_package_serves(
    made: Path, run: Callable[..., str], family: str, backend: str, settings: dict[str, Any]
) -> None:
    if "model" in settings:
        settings = {
            **settings,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "model": str(made / settings["model"]),
        }
    ids, backends = json.loads(run("-c", GENERATE, json.dumps(settings)).splitlines()[-1])
    assert len(ids) == 8
    assert backend in backends[family]


def test_command_runs(run: Callable[..., str]) -> None:
    assert run("-m", "tokenspeed_core.cli", "acme-command", "Ada") == "hello, Ada\n"
    assert "acme-command" in run("-m", "tokenspeed_core.cli", "--help")
