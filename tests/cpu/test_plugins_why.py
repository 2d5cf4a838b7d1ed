"""`tokenspeed plugins why`: every candidate for an op, for this machine and for others, without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tokenspeed_core.cli import main


def why(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["plugins", "why", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plugins", "why", *words]) == 2
    return capsys.readouterr().err


def test_every_candidate_comes_with_all_its_reasons_and_what_would_change_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plugins", "why", "attention", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("on CPU")
    assert "runs   torch from tokenspeed-kernels: the reference" in text
    assert "cannot triton from tokenspeed-kernels" in text
    assert "it runs on cuda, and the device is cpu\n           -> a cuda device" in text


def test_a_platform_that_is_not_here_is_answered_without_its_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    for name, capability in (("sm90", "9.0"), ("sm_100a", "10.0"), ("SM103", "10.3")):
        answer = why(capsys, "attention", "--platform", name)
        assert f"compute capability {capability} " in answer["platform"]
        assert {op["backend"] for op in answer["ops"]} <= {"triton", "blackwell"}
        verdicts = {v["backend"]: v for op in answer["ops"] for v in op["verdicts"]}
        assert verdicts["torch"]["fits"] is False
    assert why(capsys, "attention", "--platform", "cpu")["platform"] == "CPU"


def test_an_answer_is_for_the_flags_of_serve_and_for_a_layer(capsys: pytest.CaptureFixture[str]) -> None:
    (prefill, decode) = why(capsys, "attention", "demo", "--platform", "sm90", "--layer", "1", "--block-size", "64",
                            "--attention-backend.decode", "triton")["ops"]
    assert prefill["problem"]["block_size"] == 64
    assert 1 in prefill["layers"]
    assert decode["because"] == "asked for by --attention-backend.decode"


def test_kernels_that_were_not_even_candidates_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("old", "m:S [api9]"), ("broken", "no_such_module:S [api1]")):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[tokenspeed.kernels.attention]\n{name} = {value}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    answer = why(capsys, "attention", "--device", "cpu")
    told = {entry["name"]: (entry["status"], entry["reason"]) for entry in answer["not_considered"]}
    assert told["old"] == (
        "incompatible", "needs api 9 of kernels.attention, this core has 1: upgrade tokenspeed-core"
    )
    assert told["broken"] == ("failed", "ModuleNotFoundError: No module named 'no_such_module'")
    assert main(["plugins", "why", "attention", "--device", "cpu"]) == 0
    assert "old from old 1.0: incompatible: needs api 9" in capsys.readouterr().out


def test_what_has_no_answer_is_refused_with_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert "why atn: this model asks for no such op; it asks for add_rms_norm" in refused(capsys, "atn")
    assert "attention has layers 0 to 4" in refused(capsys, "attention", "--layer", "99")
    assert "sample has no layers" in refused(capsys, "sample", "--layer", "0")
    assert "no such platform; cpu, or a compute capability" in refused(capsys, "attention", "--platform", "h100")
    assert "--device cpu: --platform sm90" in refused(capsys, "attention", "--platform", "sm90", "--device", "cpu")


def test_a_backend_that_was_asked_for_and_cannot_run_is_an_error_with_every_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = refused(capsys, "attention", "--platform", "cpu", "--attention-backend", "triton")
    assert "--attention-backend asks for triton" in error
    assert "it runs on cuda, and the device is cpu" in error


def test_the_options_that_a_backend_was_given_are_shown_as_they_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    option = ("--backend-option", "triton.max_splits=1")
    assert main(["plugins", "why", "attention", "--platform", "sm90", *option]) == 0
    assert "\n           --backend-option triton.max_splits=1\n" in capsys.readouterr().out
