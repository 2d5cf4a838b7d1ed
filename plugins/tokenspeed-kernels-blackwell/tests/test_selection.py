"""Selection on compute capability 10.0 and elsewhere, without a device."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
from tokenspeed_server.dry_run import dry_run
from tokenspeed_server.settings import ServerConfig
from tokenspeed_testing.explain import explain

from tokenspeed_core.api.attention import AttentionProblem
from tokenspeed_core.api.kernels import PlatformInfo
from tokenspeed_core.cli import main
from tokenspeed_core.errors import SelectionError
from tokenspeed_core.kernels.installed import installed_kernels, installed_ops, installed_rankings
from tokenspeed_core.kernels.overrides import Override
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.kernels.table import kernel_table
from tokenspeed_core.plugins import Catalog


def selector(capability: tuple[int, int]) -> Selector:
    catalog = Catalog.discover()
    return Selector(
        installed_kernels(catalog),
        PlatformInfo("cuda", capability, f"compute capability {capability}"),
        rankings=installed_rankings(catalog),
        ops=installed_ops(catalog),
        needs=frozenset({"graph_safe"}),
    )


def problem(phase: str, block_size: int = 64, dtype: str = "bfloat16") -> AttentionProblem:
    return AttentionProblem(phase, 32, 8, 128, dtype, dtype, block_size, 128**-0.5, None)


@pytest.mark.parametrize("capability", [(10, 0), (10, 1), (10, 3)])
def test_auto_uses_blackwell_for_prefill_triton_for_decode(
    capability: tuple[int, int],
) -> None:
    chosen = selector(capability)
    for phase in ("prefill", "decode"):
        chosen.select_attention(problem(phase))
    assert [(planned.backend, planned.distribution) for planned in chosen.plan().ops] == [
        ("blackwell", "tokenspeed-kernels-blackwell"),
        ("triton", "tokenspeed-kernels"),
    ]
    assert "not blackwell from tokenspeed-kernels-blackwell: phase decode is not supported" in (
        explain(chosen.plan(), "attention")
    )


def test_block_size_is_chosen_for_prefill() -> None:
    why = [
        sys.executable,
        "-m",
        "tokenspeed_core.cli",
        "plugins",
        "why",
        "attention",
        "--platform",
        "sm100",
        "--json",
    ]
    message = json.loads(subprocess.run(why, capture_output=True, check=True, timeout=120).stdout)
    chosen = {
        each["problem"]["phase"]: (each["backend"], each["problem"]["block_size"])
        for each in message["ops"]
    }
    assert chosen == {"prefill": ("blackwell", 64), "decode": ("triton", 64)}


@pytest.mark.parametrize("capability", [(9, 0), (12, 0)])
def test_other_devices_get_the_reason(
    capability: tuple[int, int],
) -> None:
    chosen = selector(capability)
    assert chosen.select_attention(problem("prefill")).spec.backend == "triton"
    major, minor = capability
    message = f"blackwell: compute capability {major}.{minor} is not supported"
    assert message in kernel_table(chosen.plan())


def test_unsupported_problems_use_triton() -> None:
    chosen = selector((10, 0))
    for other, reason in (
        (problem("prefill", block_size=16), "block_size 16 is not supported"),
        (problem("prefill", dtype="float32"), "dtype float32 is not supported"),
    ):
        assert chosen.select_attention(other).spec.backend == "triton"
        assert reason in explain(chosen.plan(), "attention")


def test_plugins_why_without_gpu_gives_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "why", "attention", "--device", "cpu"]) == 0
    _, _, found = capsys.readouterr().out.partition("blackwell from tokenspeed-kernels-blackwell\n")
    assert "device cpu is not supported" in found.splitlines()[0]


def test_naming_it_without_gpu_is_an_error() -> None:
    config = ServerConfig.from_keywords(
        device="cpu", attention_backend={"prefill": "blackwell", "decode": "torch"}
    )
    with pytest.raises(
        SelectionError,
        match=r"(?s)--attention-backend\.prefill selects blackwell.*that fit: torch",
    ):
        dry_run(config)


def test_auto_skips_backends_that_need_compilation() -> None:
    catalog = Catalog.discover()
    for names, taken in ((("auto",), "blackwell"), (("trtllm",), "trtllm"), (("fa4",), "fa4")):
        chosen = Selector(
            installed_kernels(catalog),
            PlatformInfo("cuda", (10, 3), "B300"),
            [Override.parse("attention", names)],
            module_exists=lambda name: True,
        )
        assert chosen.select_attention(problem("prefill")).spec.backend == taken


@pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is not None, reason="the library is installed"
)
def test_missing_library_shows_how_to_install_it() -> None:
    chosen = selector((10, 0))
    chosen.select_attention(problem("decode"))
    assert (
        "module 'flashinfer' is not installed -> pip install 'tokenspeed-kernels-blackwell[flashinfer]'"
        in (explain(chosen.plan(), "attention"))
    )
