"""Backend flags on the command line: each one applies, or it is an error."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from plugin_files import write_plugin

from tokenspeed_core.api import hookimpl
from tokenspeed_core.api.kernels import PHASES
from tokenspeed_core.cli import main
from tokenspeed_core.config import Config
from tokenspeed_core.config.settings import flag
from tokenspeed_core.kernels.installed import installed_ops
from tokenspeed_core.kernels.overrides import DTYPE_FORMATS, as_typed
from tokenspeed_core.plugins import Catalog, Selection

DRY = ("serve", "--dry-run", "--device", "cpu")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (
            ("--attention-backend", "triton"),
            ("--attention-backend", "triton (tokenspeed-kernels)"),
        ),
        (("--attention-backend.decode", "triton"), ("--attention-backend.decode",)),
        (("--attention-backend", "fa3,triton"), ("fa3 (tokenspeed-kernels-hopper)",)),
        (("--kernel-backend", "write_kv=triton"), ("--kernel-backend write_kv", "triton")),
        (("--kernel-backend", "qk_norm_rope_write_kv=triton"), ("'qk_norm_rope_write_kv'",)),
        (("--kernel-backend", "norm=nonesuch"), ("'nonesuch'", "torch, triton")),
        (("--attention-backend", "zeta,omega,beta,alpha,auto"), ("'alpha'",)),
        (("--kernel-backend", "norn=torch"), ("'norn'", "activation, add_rms_norm")),
        (("--kernel-backend", "norm.3-1.decode=torch"), ("OP.PHASE or OP.FORMAT",)),
        (
            ("--kernel-backend", "attention.fp16=torch"),
            ("attention.fp16 ", "attention decode bfloat16"),
        ),
        (("--kernel-backend", "linear.fp8=torch"), ("linear.fp8 ", "linear bfloat16")),
        (("--kernel-backend", "norm.decode=torch"), ("norm.decode ", "rms_norm bfloat16")),
        (("--moe-backend.mxfp4", "torch"), ("--moe-backend.mxfp4", "--kernel-backend moe")),
        (("--moe-backend", "torch"), ("--moe-backend", "add_rms_norm")),
        (("--attention-backend.0-3", "torch"), ("--attention-backend.prefill",)),
        (("--sampling-backend.bf16", "torch"), ("--kernel-backend sampling",)),
        (("--attention-backend", "auto,torch"), ("--attention-backend auto,torch",)),
        (("--kernel-backend", "moe.fp6=torch"), ("moe.fp6", "mxfp4, mxfp8, nvfp4")),
        (("--kernel-backend", "attention.fp8=torch"), ("attention.fp8", "bf16, fp16, fp32")),
        (
            ("--kernel-backend", "attention=torch", "--attention-backend", "torch"),
            ("--attention-backend", "--kernel-backend attention"),
        ),
        (("--kernel-backend", "attention"), ("--kernel-backend attention", "NAME=VALUE")),
        (("--backend-option", "triton.max_splits=1"), ("triton.max_splits", "torch")),
    ],
)
def test_flag_without_effect_is_refused(
    words: tuple[str, ...], named: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*DRY, *words]) == 2
    error = capsys.readouterr().err
    assert all(each in error for each in named), error


def test_error_names_the_source_of_a_backend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plugin(tmp_path, "acme", "hooks", {"choice": "acme_hooks [api1]"}, {})
    module = ModuleType("acme_hooks")
    module.adjust_config = hookimpl(  # type: ignore[attr-defined]
        lambda config: {"attention_backend": "triton", "kernel_backend": {"greedy": ["triton"]}}
    )
    monkeypatch.setitem(sys.modules, "acme_hooks", module)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(DRY) == 2
    error = capsys.readouterr().err
    assert "--attention-backend (from plugin acme:choice)" in error
    assert main([*DRY, "--attention-backend", "torch"]) == 2
    assert "--kernel-backend greedy (from plugin acme:choice)" in capsys.readouterr().err
    monkeypatch.setenv("TOKENSPEED_ATTENTION_BACKEND", "triton")
    assert main(DRY) == 2
    assert "--attention-backend (from TOKENSPEED_ATTENTION_BACKEND)" in capsys.readouterr().err


def test_hint_leaves_out_the_source_of_the_flag() -> None:
    assert (
        as_typed("--attention-backend.decode (from plugin acme:x)", "torch")
        == "--attention-backend.decode torch"
    )
    assert (
        as_typed("--kernel-backend norm (from a.yaml)", "torch", "auto")
        == "--kernel-backend norm=torch,auto"
    )


def test_dry_run_shows_overrides_as_typed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = (
        "--kernel-backend",
        "attention.decode=torch",
        "--kernel-backend",
        "norm=triton,auto",
        "--attention-backend",
        "torch",
        "--attention-backend.prefill",
        "torch,auto",
        "--enforce-eager",
    )
    assert main([*DRY, *words]) == 0
    report = capsys.readouterr().out
    assert (
        "  kernel_backend: attention.decode=torch norm=triton,auto (--kernel-backend)\n" in report
    )
    assert "  attention_backend: torch prefill=torch,auto (--attention-backend" in report
    table = report.split("kernels on ")[1].splitlines()[:-1]
    assert max(map(len, table)) <= 80
    assert len(table) <= 26
    assert any(line.startswith("attention ") and "torch" in line for line in table)


def test_format_covers_quantized_ops(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DRY, "--quantization", "fp8", "--kernel-backend", "linear.fp8=torch"]) == 0
    assert main([*DRY, "--kernel-backend", "linear.bf16=torch"]) == 0
    assert (
        main(
            [
                "plugins",
                "why",
                "linear",
                "--device",
                "cpu",
                "--quantization",
                "fp8",
                "--kernel-backend",
                "linear.fp8=torch",
            ]
        )
        == 0
    )
    assert "--kernel-backend linear.fp8" in capsys.readouterr().out


def test_every_narrowed_flag_can_match_an_op() -> None:
    families: dict[str, set[str]] = {}
    for op in installed_ops(Catalog.discover(Selection())).values():
        families.setdefault(f"kernels.{op.family}", set()).add(op.name)
    keys = [(name, key) for name in Config.model_fields for key in Config.metadata(name)["narrow"]]
    assert ("attention_backend", "decode") in keys
    for name, key in keys:
        named_after = any(op.endswith(f"_{key}") for op in families[Config.metadata(name)["kind"]])
        assert named_after or key in (*PHASES, *DTYPE_FORMATS), (
            f"{flag(name)}.{key} can match nothing"
        )
