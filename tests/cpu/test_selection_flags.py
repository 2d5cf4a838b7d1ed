"""The selection flags on a command line: what a person reads when one has no effect, and that none is passed over."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from tokenspeed_core import LLM
from tokenspeed_core.api import hookimpl
from tokenspeed_core.api.kernels import PHASES
from tokenspeed_core.cli import main
from tokenspeed_core.config.schema import Config, flag, metadata
from tokenspeed_core.kernels.installed import installed_ops
from tokenspeed_core.kernels.overrides import SHORT
from tokenspeed_core.kernels.plan import typed
from tokenspeed_core.plugins import Catalog, Selection

DRY = ("serve", "--dry-run", "--device", "cpu")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--attention-backend", "triton"), "--attention-backend asks for triton"),
        (
            ("--attention-backend", "triton"),
            "triton (tokenspeed-kernels): it runs on cuda, and the device is cpu",
        ),
        (("--attention-backend.decode", "triton"), "--attention-backend.decode asks for triton"),
        (("--attention-backend", "fa3,triton"), "fa3 (tokenspeed-kernels-hopper): it runs on cuda"),
        (("--kernel-backend", "write_kv=triton"), "--kernel-backend write_kv asks for triton"),
        (("--kernel-backend", "qk_norm_rope_write_kv=triton"), "'qk_norm_rope_write_kv'"),
        (
            ("--kernel-backend", "attention.decode.2=triton"),
            "--kernel-backend attention.decode.2 asks for triton",
        ),
        (
            ("--kernel-backend", "norm=nonesuch"),
            "no kernels.norm named 'nonesuch'; installed: torch, triton",
        ),
        (
            ("--attention-backend", "zeta,omega,beta,alpha,auto"),
            "no kernels.attention named 'alpha'",
        ),  # as each time
        (
            ("--kernel-backend", "norn=torch"),
            "there is no op or family 'norn'; there is activation, add_rms_norm",
        ),
        (("--kernel-backend", "norm.3-1.decode=torch"), "must read OP[.PHASE][.DTYPE][.LAYERS]"),
        (
            ("--kernel-backend", "attention.5-99=torch"),
            "attention.5-99 has no effect: attention is asked for with "
            "phase decode, prefill; dtype bfloat16; layers 0-4",
        ),
        (("--kernel-backend", "attention.float16=torch"), "dtype bfloat16"),
        (("--kernel-backend", "linear.fp8=torch"), "with phase none; dtype bfloat16; layers 0-4"),
        (
            ("--kernel-backend", "norm.5=torch"),
            "norm is asked for as add_rms_norm, rms_norm, with phase none",
        ),
        (
            ("--moe-backend.bf16", "torch"),
            "--moe-backend.bf16 has no effect: the model asks for no moe",
        ),
        (
            ("--moe-backend.mxfp8", "torch-blocks"),
            "--moe-backend.mxfp8 has no effect: the model asks for no moe",
        ),
        (
            ("--moe-backend.mxfp4", "torch"),
            "--moe-backend.mxfp4: no such setting; there is --moe-backend.bf16, "
            "--moe-backend.fp16, --moe-backend.fp8, --moe-backend.mxfp8, --moe-backend.nvfp4",
        ),
        (
            ("--attention-backend.0-3", "torch"),
            "no such setting; there is --attention-backend.prefill, "
            "--attention-backend.decode; --kernel-backend attention[.PHASE][.DTYPE][.LAYERS]=NAME, as attention.0-3=NAME",
        ),
        (
            ("--sampling-backend.bf16", "torch"),
            "no such setting; there is --sampling-backend alone; --kernel-backend sampling[",
        ),
        (
            ("--attention-backend", "auto,torch"),
            "--attention-backend auto,torch: auto takes any that fits",
        ),
        (
            ("--kernel-backend", "moe.mxfp4=torch"),
            "--kernel-backend moe.mxfp4: no op of moe is named after mxfp4; "
            "it may be narrowed to bf16, fp16, fp32, fp8, mxfp8, nvfp4",
        ),
        (
            ("--kernel-backend", "attention.fp8=torch"),
            "no op of attention is named after fp8; it may be narrowed to bf16, fp16, fp32",
        ),
        (
            ("--kernel-backend", "attention.3-99=torch"),
            "--kernel-backend attention.3-99 goes beyond the last layer, 4: "
            "attention is asked for with phase decode, prefill; dtype bfloat16; layers 0-4",
        ),
        (("--moe-backend.int3", "torch"), "--moe-backend.int3: no such setting"),
        (("--kernel-backend", "norm.decode=torch"), "--kernel-backend norm.decode has no effect"),
        (
            ("--moe-backend", "torch"),
            "--moe-backend has no effect: the model asks for no moe, but for add_rms_norm",
        ),
        (
            ("--kernel-backend", "attention=torch", "--attention-backend", "torch"),
            "--attention-backend and --kernel-backend attention both speak of attention: give one, or narrow it",
        ),
        (
            ("--kernel-backend", "attention"),
            "--kernel-backend attention: 'attention' must read NAME=VALUE",
        ),
        (("--backend-option", "triton.max_splits=1"), "used are torch; their options: none"),
    ],
)
def test_a_flag_without_effect_is_an_error_that_says_what_there_is(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*DRY, *words]) == 2
    assert said in capsys.readouterr().err


def test_a_backend_that_a_hook_or_a_variable_wants_is_not_put_down_to_a_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "wishing-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wishing\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tokenspeed.hooks]\nwishes = wishing_hooks [api1]\n")
    module = ModuleType("wishing_hooks")
    module.adjust_config = hookimpl(  # type: ignore[attr-defined]
        lambda config: {"attention_backend": "triton", "kernel_backend": {"greedy": ["triton"]}}
    )
    monkeypatch.setitem(sys.modules, "wishing_hooks", module)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(DRY) == 2
    said = capsys.readouterr().err
    assert "--attention-backend (from plugin wishing:wishes) asks for triton" in said
    assert main([*DRY, "--attention-backend", "torch"]) == 2
    assert (
        "--kernel-backend greedy (from plugin wishing:wishes) asks for triton"
        in capsys.readouterr().err
    )
    monkeypatch.setenv("TOKENSPEED_ATTENTION_BACKEND", "triton")
    assert main(DRY) == 2
    assert (
        "--attention-backend (from TOKENSPEED_ATTENTION_BACKEND) asks for triton"
        in capsys.readouterr().err
    )


def test_what_a_person_is_to_type_in_place_of_it_is_the_flag_alone() -> None:
    assert (
        typed("--attention-backend.decode (from plugin acme:x)", "torch")
        == "--attention-backend.decode torch"
    )
    assert (
        typed("--kernel-backend norm (from a.yaml)", "torch", "auto")
        == "--kernel-backend norm=torch,auto"
    )


def test_what_was_narrowed_is_in_the_report_as_it_is_typed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = (
        "--kernel-backend",
        "attention.decode.0-1=torch",
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
        "  kernel_backend: attention.decode.0-1=torch norm=triton,auto (--kernel-backend)\n"
        in report
    )
    assert "  attention_backend: torch prefill=torch,auto (--attention-backend" in report
    assert "  enforce_eager: on (--enforce-eager)\n" in report
    table = report.split("kernels on ")[1].splitlines()[:-1]
    assert max(map(len, table)) <= 80
    assert len(table) <= 24
    assert any(line.startswith("attention ") and "torch" in line for line in table)


def test_a_format_narrows_to_what_is_quantised_so(capsys: pytest.CaptureFixture[str]) -> None:
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
    assert "asked for by --kernel-backend linear.fp8" in capsys.readouterr().out


def test_every_flag_that_narrows_a_backend_to_a_format_can_match_an_op() -> None:
    families: dict[str, set[str]] = {}
    for op in installed_ops(Catalog.discover(Selection())).values():
        families.setdefault(f"kernels.{op.family}", set()).add(op.name)
    keys = [(name, key) for name in Config.model_fields for key in metadata(name)["narrow"]]
    assert ("moe_backend", "nvfp4") in keys
    for name, key in keys:
        named_after = any(op.endswith(f"_{key}") for op in families[metadata(name)["kind"]])
        assert named_after or key in (*PHASES, *SHORT), f"{flag(name)}.{key} can match nothing"


def test_a_layer_may_have_a_backend_of_its_own_for_any_op() -> None:
    wishes = {"linear.1-2": "torch", "norm.3": "torch"}
    with LLM(device="cpu", max_total_tokens=512, max_model_len=128, kernel_backend=wishes) as llm:
        layers = {(planned.op, planned.asked_by): planned.layers for planned in llm.kernel_plan.ops}
    assert layers["linear", "--kernel-backend linear.1-2"] == (1, 2)
    assert layers["linear", "auto"] == (0, 3, 4)
    assert layers["add_rms_norm", "--kernel-backend norm.3"] == (3,)
    assert layers["add_rms_norm", "auto"] == (0, 1, 2, 4)
    assert layers["greedy", "auto"] == ()


def test_layers_may_have_backends_of_their_own_and_the_answer_stays() -> None:
    texts = []
    for wishes in ({}, {"attention.decode.0-1": "torch", "write_kv.3": "torch"}):
        with LLM(
            device="cpu", max_total_tokens=512, max_model_len=128, kernel_backend=wishes
        ) as llm:
            texts.append(llm.generate("12 + 34 =")[0].outputs[0].token_ids)
            layers = {planned.asked_by: planned.layers for planned in llm.kernel_plan.ops}
    assert layers["--kernel-backend attention.decode.0-1"] == (0, 1)
    assert layers["--kernel-backend write_kv.3"] == (3,)
    assert texts[0] == texts[1]
