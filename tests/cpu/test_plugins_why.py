"""`tokenspeed plugins why` shows every candidate for an op."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plugin_files import write_plugin

from tokenspeed_core.api import Ranking
from tokenspeed_core.cli import main
from tokenspeed_core.kernels.installed import installed_kernels
from tokenspeed_core.plugins import Catalog
from tokenspeed_kernels.descriptors import TORCH_ATTENTION

pytestmark = pytest.mark.slow


def why(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["plugins", "why", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plugins", "why", *words]) == 2
    return capsys.readouterr().err


def test_text_shows_reasons_and_hints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plugins", "why", "attention", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("on CPU")
    assert "runs   torch from tokenspeed-kernels: the reference\n" in text
    assert "not    triton from tokenspeed-kernels" in text
    assert "device cpu is not supported (supported: cuda)\n           -> use a cuda device" in text


@pytest.mark.parametrize("fastest", ["triton", "torch"])
def test_figures_of_ranked_experts_are_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fastest: str
) -> None:
    names = sorted(("triton", "torch"), key=lambda name: name != fastest)
    figures = tuple((name, f"{index + 1}.00 times") for index, name in enumerate(names))
    ranking = Ranking("moe_experts", None, (9, 0), figures)
    monkeypatch.setattr("tokenspeed_kernels.rankings.RANKINGS", (ranking,))
    model = Path(__file__).parents[2] / "tokenspeed_models/example/qwen3_moe"
    # CUDA graphs cannot hold the reference.
    words = ("plugins", "why", "moe", str(model), "--platform", "sm90", "--enforce-eager")
    assert main(list(words)) == 0
    text = capsys.readouterr().out
    experts = text.partition("\nmoe_experts ")[2].partition("\n\n")[0]
    assert f"  runs   {fastest} from tokenspeed-kernels: 1.00 times\n" in experts
    assert (
        f"  fits   {names[1]} from tokenspeed-kernels\n           2.00 times, {fastest} comes first\n"
        in experts
    )
    route = text.partition("\nmoe_route ")[2].partition("\n\n")[0]
    unranked = "no measured ranking for compute capability 9.0"
    assert f"the most specific that fits, {unranked}\n" in route
    assert f"{unranked}, triton comes first\n" in route


MANY_REASONS = """
from tokenspeed_core.api import AxisLimit, Capability, KernelSpec
SPEC = KernelSpec(
    "attention", "acme",
    Capability(("cuda",), ("float16",), head_sizes=(13,), block_sizes=(7,), phases=("decode",),
               limits=(AxisLimit("num_heads", 3, 5),)),
    "acme_reasons:make", requires=("no_such_module",), obtain="pip install no-such",
)
"""


def test_every_kernel_is_a_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = {"acme": "acme_reasons:SPEC [api1]"}
    write_plugin(tmp_path, "acme", "kernels.attention", entries, {"acme_reasons": MANY_REASONS})
    monkeypatch.syspath_prepend(str(tmp_path))
    installed = [
        kernel for kernel in installed_kernels(Catalog.discover()) if kernel.spec.op == "attention"
    ]
    answer = why(capsys, "attention", "--platform", "cpu")
    assert main(["plugins", "why", "attention", "--platform", "cpu"]) == 0
    text = capsys.readouterr().out
    for op in answer["ops"]:
        listed = [(each["backend"], each["distribution"]) for each in op["verdicts"]]
        assert sorted(listed) == sorted(
            (kernel.spec.backend, kernel.distribution) for kernel in installed
        )
        for each in op["verdicts"]:
            assert each["fits"] == (each["backend"] == "torch")
            assert each["reasons"] or each["fits"]
            assert (
                "".join(
                    f"           {reason['what']}\n"
                    + f"           -> {reason['hint']}\n" * bool(reason["hint"])
                    for reason in each["reasons"]
                )
                in text
            )
    (reasons,) = [
        each["reasons"] for each in answer["ops"][0]["verdicts"] if each["backend"] == "acme"
    ]
    assert answer["ops"][0]["problem"]["phase"] == "prefill"
    assert [(each["what"], each["hint"]) for each in reasons] == [
        ("device cpu is not supported (supported: cuda)", "use a cuda device"),
        ("module 'no_such_module' is not installed", "pip install no-such"),
        ("dtype bfloat16 is not supported (supported: float16)", "--dtype float16"),
        ("head_size 64 is not supported (supported: 13)", ""),
        ("block_size 16 is not supported (supported: 7)", "--block-size 7"),
        ("phase prefill is not supported (supported: decode)", ""),
        ("num_heads 8 is above 5", ""),
    ]


def test_absent_platform_can_be_selected(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, capability in (("sm90", "9.0"), ("sm_100a", "10.0"), ("SM103", "10.3")):
        answer = why(capsys, "attention", "--platform", name)
        assert f"compute capability {capability} " in answer["platform"]
        assert {op["backend"] for op in answer["ops"]} <= {"triton", "blackwell"}
        verdicts = {v["backend"]: v for op in answer["ops"] for v in op["verdicts"]}
        assert verdicts["torch"]["fits"] is False
    assert why(capsys, "attention", "--platform", "cpu")["platform"] == "CPU"


def test_flags_of_serve_and_layer_apply(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (prefill, decode) = why(
        capsys,
        "attention",
        "demo",
        "--platform",
        "sm90",
        "--layer",
        "1",
        "--block-size",
        "64",
        "--attention-backend.decode",
        "triton",
    )["ops"]
    assert prefill["problem"]["block_size"] == 64
    assert 1 in prefill["layers"]
    assert "--attention-backend.decode" in decode["because"]


def test_unusable_plugins_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("old", "m:S [api9]"), ("broken", "no_such_module:S [api1]")):
        write_plugin(tmp_path, name, "kernels.attention", {name: value}, {})
    monkeypatch.syspath_prepend(str(tmp_path))
    answer = why(capsys, "attention", "--device", "cpu")
    statuses = {
        entry["name"]: (entry["status"], entry["reason"]) for entry in answer["not_considered"]
    }
    assert statuses["old"] == (
        "incompatible",
        "needs api 9 of kernels.attention, this core has 1: upgrade tokenspeed-core",
    )
    assert statuses["broken"] == ("failed", "ModuleNotFoundError: No module named 'no_such_module'")
    assert main(["plugins", "why", "attention", "--device", "cpu"]) == 0
    assert "old from old 1.0: incompatible: needs api 9" in capsys.readouterr().out


RAISING = {  # an entry point that raises, and modules of its plugin
    "its descriptor": ("kernels.attention", ("acme", "acme_ends:SPEC [api1]"), {}),
    "its kernel": (
        "kernels.attention",
        ("acme", "acme_spec:SPEC [api1]"),
        {
            "acme_spec": "from tokenspeed_core.api import Capability, KernelSpec\n"
            "SPEC = KernelSpec('attention', 'acme', Capability(('cpu',), ('bfloat16',)), 'acme_ends:make')\n",
        },
    ),
    "its family": (
        "models",
        ("AcmeForCausalLM", "acme_spec:SPEC [api1]"),
        {
            "acme_spec": "from tokenspeed_core.api import ModelSpec\n"
            "SPEC = ModelSpec('AcmeForCausalLM', 'acme_ends:describe', 'acme_ends:Model')\n",
        },
    ),
}


@pytest.mark.parametrize(
    "raising",
    [pytest.param("its descriptor", marks=pytest.mark.release), "its kernel", "its family"],
)
def test_plugin_that_exits_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raising: str
) -> None:
    kind, entry, modules = RAISING[raising]
    name, target = entry
    modules = {**modules, "acme_ends": "raise SystemExit(0)\n"}
    write_plugin(tmp_path, "acme", kind, {name: target}, modules)
    words = ["attention", "--device", "cpu"]
    if kind == "models":
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text('{"architectures": ["AcmeForCausalLM"]}')
        words[1:1] = [str(tmp_path / "model")]
    is_named = raising == "its kernel"  # auto would not choose a third-party kernel
    if is_named:
        words += ["--attention-backend", "acme,auto"]
    command = [sys.executable, "-P", "-m", "tokenspeed_core.cli", "plugins", "why", *words]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=120
    )
    output = done.stdout + done.stderr
    if kind == "models":
        assert done.returncode == 2
        assert "acme_ends:describe: SystemExit: 0" in done.stderr
    else:
        assert done.returncode == 0
        assert "acme from acme" in output
        assert "SystemExit: 0" in output


def test_all_collectives_of_a_step_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    for op in ("comm", "all_reduce"):
        assert "--tp 2" in refused(capsys, op, "--device", "cpu")
    words = ("all_reduce", "--tp", "4", "--platform", "sm90")
    assert main(["plugins", "why", *words]) == 0
    text = capsys.readouterr().out
    assert "8,448 B per token, and 2,304 B more per sampled token" in text
    assert "no all-reduce is fused with a norm: by default" in text
    collectives = why(capsys, *words)["collectives"]
    assert {each["collective"]["op"] for each in collectives} == {"all_reduce", "all_gather"}


def test_unknown_op_layer_and_platform_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "add_rms_norm" in refused(capsys, "atn")
    assert "0 to 4" in refused(capsys, "attention", "--layer", "99")
    assert "sample" in refused(capsys, "sample", "--layer", "0")
    assert "did you mean attention" in refused(capsys, "atention")
    unused = refused(capsys, "exchange_tokens", "--tp", "2", "--device", "cpu")
    assert "all_reduce" in unused
    assert "did you mean" not in unused  # a known op, without --all2all-backend
    assert "plugins list" in refused(capsys, "grammars")
    for platform in ("h100", "sm900", "sm9", "sm00"):
        assert platform in refused(capsys, "attention", "--platform", platform)
    assert "--platform sm90" in refused(
        capsys, "attention", "--platform", "sm90", "--device", "cpu"
    )


def test_selected_backend_that_cannot_run_is_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(["plugins", "why", "attention", "--platform", "cpu", "--attention-backend", "triton"])
        == 2
    )
    output = capsys.readouterr()
    assert output.err.count("\n") == 1
    assert "--attention-backend" in output.err
    assert "runs   nothing: --attention-backend" in output.out
    assert "           -> --attention-backend triton,torch,auto\n" in output.out
    assert (
        "not    triton from tokenspeed-kernels\n           device cpu is not supported (supported: cuda)"
        in output.out
    )
    assert "  fits   torch from tokenspeed-kernels\n" in output.out


def test_hint_for_an_unmet_override_works(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plugins", "why", "attention", "--platform", "sm100", "--attention-backend")
    assert main([*words, "blackwell"]) == 2
    output = capsys.readouterr().out
    hint = output.partition("  runs   nothing: ")[2].splitlines()[1]
    assert hint.startswith("           -> --attention-backend ")
    assert main([*words, hint.split()[-1]]) == 0


@pytest.mark.parametrize(
    "backend", ["blackwell", pytest.param("triton", marks=pytest.mark.release)]
)
def test_backend_may_lack_an_op_of_the_family(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = json.loads(
        (Path(__file__).parents[2] / "tokenspeed_models/example/qwen3_moe/config.json").read_text()
    )
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 128,
        "moe_intermediate_size": 128,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps({**model, **sizes}))
    words = (str(tmp_path), "--quantization", "mxfp8", "--platform", "sm100")
    found = why(capsys, "moe", *words, "--moe-backend", backend)["ops"]
    # blackwell has experts in MXFP8 and no router, and triton has the opposite.
    assert {op["op"]: op["backend"] for op in found} == {
        "moe_route": "triton",
        "moe_experts_mxfp8": "blackwell",
    }
    for op in found:
        absent = [verdict["backend"] for verdict in op["verdicts"] if verdict["is_absent"]]
        assert absent == ([] if op["backend"] == backend else [backend])


def test_no_hint_for_block_sizes_that_were_tried(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(
            [
                "plugins",
                "why",
                "attention",
                "--platform",
                "sm100",
                "--attention-backend",
                "blackwell",
            ]
        )
        == 2
    )
    output = capsys.readouterr().out
    assert "\nattention (layer 0): block_size=64, " in output
    blackwell = output.partition("not    blackwell from tokenspeed-kernels-blackwell\n")[2]
    assert blackwell.startswith("           phase decode is not supported (supported: prefill)\n  ")


def test_json_contains_verdicts_if_nothing_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("attention", "--platform", "sm75", "--kv-cache-dtype", "fp8_e4m3", "--json")
    assert main(["plugins", "why", *words]) == 2
    output = capsys.readouterr()
    answer = json.loads(output.out)
    assert output.err == f"tokenspeed: {answer['error']}\n"
    assert answer["error"].startswith("no kernel for op 'attention' (block_size=")
    assert "7.5" in answer["platform"]
    (op,) = answer["ops"]
    assert (op["backend"], op["because"]) == ("", "no installed kernel fits")
    hints = {reason["hint"] for verdict in op["verdicts"] for reason in verdict["reasons"]}
    assert {"--kv-cache-dtype auto", "use a device of compute capability 8.9 or newer"} <= hints


@pytest.mark.parametrize(
    ("platform", "settings", "max_tried"),
    [
        ("sm90", (), 4),
        pytest.param("sm90", (), 1000, marks=pytest.mark.release),
        pytest.param("sm100", (), 1000, marks=pytest.mark.release),
        *(
            pytest.param(platform, settings, 1000, marks=pytest.mark.release)
            for platform in ("sm90", "sm100")
            for settings in (("--quantization", "mxfp8"), ("--attention-backend", "triton"))
        ),
    ],
)
def test_hint_for_a_fitting_kernel_selects_it(
    capsys: pytest.CaptureFixture[str], platform: str, settings: tuple[str, ...], max_tried: int
) -> None:
    on = ("--platform", platform, *settings)
    all_ops = (
        refused(capsys, "nothing", *on).partition("its ops are ")[2].partition(";")[0].split(", ")
    )
    num_tried = 0
    for op in all_ops:
        for planned in (each for each in why(capsys, op, *on)["ops"] if each["op"] == op):
            for verdict in (
                each for each in planned["verdicts"] if each["fits"] and each["reasons"]
            ):
                (reason,) = verdict["reasons"]
                again = why(capsys, op, *on, *reason["hint"].split())["ops"]
                (same,) = [
                    each
                    for each in again
                    if (each["op"], each["problem"]) == (op, planned["problem"])
                ]
                assert same["backend"] == verdict["backend"], reason["hint"]
                num_tried += 1
                if num_tried == max_tried:
                    return
    assert num_tried > 5


def test_backend_options_are_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    option = ("--backend-option", "triton.max_splits=1")
    assert main(["plugins", "why", "attention", "--platform", "sm90", *option]) == 0
    assert "\n           --backend-option triton.max_splits=1\n" in capsys.readouterr().out


def test_note_of_the_kernel_that_runs_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = tuple(replace(each, note="another kernel runs long steps") for each in TORCH_ATTENTION)
    monkeypatch.setattr("tokenspeed_kernels.descriptors.TORCH_ATTENTION", noted)
    assert main(["plugins", "why", "attention", "--device", "cpu"]) == 0
    assert ": the reference\n           another kernel runs long steps\n" in capsys.readouterr().out
