"""Selection of the backend: by name, or by `auto` once the library's modules are compiled."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tokenspeed_kernels_flashinfer import attention_specs
from tokenspeed_kernels_flashinfer.__main__ import build, experts_module, main
from tokenspeed_kernels_flashinfer.compiled import Module, compiled_modules, modules_in
from tokenspeed_testing.explain import explain

from tokenspeed_core.api.attention import AttentionProblem
from tokenspeed_core.api.kernels import PlatformInfo
from tokenspeed_core.kernels.installed import InstalledKernel, installed_kernels, installed_rankings
from tokenspeed_core.kernels.overrides import Override
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.plugins import Catalog

OURS = "tokenspeed-kernels-flashinfer"
PREFILL = (
    "batch_prefill_with_kv_cache_dtype_q_{q}_dtype_kv_{kv}_dtype_o_{q}_dtype_idx_i32_head_dim_qk_{size}_"
    "head_dim_vo_{size}_posenc_0_use_swa_{window}_use_logits_cap_False_f16qk_False"
)
PLAIN = PREFILL.format(q="bf16", kv="bf16", size=128, window=False)


def problem(phase: str, head_size: int = 128) -> AttentionProblem:
    return AttentionProblem(phase, 32, 8, head_size, "bfloat16", "bfloat16", 16, 128**-0.5, None)


def compile_them(cache: Path, architecture: str, *names: str) -> tuple[Module, ...]:
    """Create files like those of the library, and return the modules found."""
    for name in names:
        folder = cache / architecture / "cached_ops" / name
        folder.mkdir(parents=True)
        (folder / f"{name}.so").touch()
    return modules_in(cache)


def selector(
    capability: tuple[int, int],
    modules: tuple[Module, ...] = (),
    names: tuple[str, ...] = ("auto",),
) -> Selector:
    """Return a selector with this backend and these compiled modules, and all other backends."""
    catalog = Catalog.discover()
    others = [kernel for kernel in installed_kernels(catalog) if kernel.distribution != OURS]
    return Selector(
        [*others, *(InstalledKernel(spec, OURS) for spec in attention_specs(modules))],
        PlatformInfo("cuda", capability, f"compute capability {capability}"),
        [Override.parse("attention", names)],
        rankings=installed_rankings(catalog),
        needs=frozenset({"graph_safe"}),
        module_exists=lambda name: name != "flash_attn_interface",
    )


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_auto_skips_backends_that_need_compilation(capability: tuple[int, int], phase: str) -> None:
    chosen = selector(capability)
    assert chosen.select_attention(problem(phase)).spec.backend == "triton"
    (line,) = [
        line
        for line in explain(chosen.plan(), "attention").splitlines()
        if f"not flashinfer from {OURS}" in line
    ]
    assert "must be compiled before the first call" in line
    named = selector(capability, names=("flashinfer",))
    named.select_attention(problem(phase))
    assert [(planned.backend, planned.distribution) for planned in named.plan().ops] == [
        ("flashinfer", OURS)
    ]


def test_auto_uses_compiled_modules_on_unranked_devices(
    tmp_path: Path,
) -> None:
    modules = compile_them(tmp_path, "80", PLAIN, "cascade")
    chosen = selector((8, 0), modules)
    for phase in ("prefill", "decode"):
        chosen.select_attention(problem(phase))
    assert {planned.distribution for planned in chosen.plan().ops} == {OURS}
    assert "must be compiled" not in explain(chosen.plan(), "attention")
    assert chosen.select_attention(problem("decode", head_size=64)).spec.backend == "triton", (
        "not compiled for these"
    )
    assert selector((8, 9), modules).select_attention(problem("decode")).spec.backend == "triton", (
        "nor for this device"
    )


def test_ranked_backends_come_first_on_hopper(tmp_path: Path) -> None:
    chosen = selector((9, 0), compile_them(tmp_path, "90a", PLAIN, f"{PLAIN}_sm90", "cascade"))
    assert {
        chosen.select_attention(problem(phase)).spec.backend for phase in ("prefill", "decode")
    } == {"triton"}
    message = explain(chosen.plan(), "attention")
    assert (
        f"not flashinfer from {OURS}: not in the measured ranking for compute capability 9.0, triton comes first "
        "-> --attention-backend.prefill flashinfer,auto" in message
    )
    assert f"another kernel of this name, from {OURS}, comes first" in message
    assert "must be compiled" not in message


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((PLAIN,), []),
        ((PLAIN, "cascade"), [("decode",)]),
        ((f"{PLAIN}_sm90", "cascade"), [("prefill",)]),
        (
            (PREFILL.format(q="bf16", kv="e4m3", size=128, window=False), "cascade"),
            [("prefill", "decode")],
        ),
        ((PREFILL.format(q="bf16", kv="bf16", size=128, window=True),), [("decode",)]),
        ((PREFILL.format(q="bf16", kv="u8", size=128, window=False), "page", "cascade"), []),
    ],
    ids=["no merging yet", "fa2", "fa3", "eight bits", "a window shares nothing", "others"],
)
def test_hopper_modules_serve_the_right_phases(
    names: tuple[str, ...], expected: list[tuple[str, ...]], tmp_path: Path
) -> None:
    assert [module.phases for module in compile_them(tmp_path, "90a", *names)] == expected


def test_module_name_is_parsed(tmp_path: Path) -> None:
    name = PREFILL.format(q="f16", kv="e4m3", size=64, window=True)
    assert compile_them(tmp_path, "80_120f", name) == tuple(
        Module(capability, "float16", "float8_e4m3fn", 64, True, ("prefill", "decode"))
        for capability in ((8, 0), (12, 0))
    )


def test_partial_compilation_is_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "80" / "cached_ops" / PLAIN
    folder.mkdir(parents=True)
    (folder / "build.ninja").touch()
    assert modules_in(tmp_path) == ()


def test_modules_are_found_in_the_library_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setattr(
        "tokenspeed_kernels_flashinfer.compiled.version",
        lambda name: "0.6.15" if name == "flashinfer-python" else version(name),
    )
    compile_them(tmp_path / ".cache" / "flashinfer" / "0.6.15", "80", PLAIN, "cascade")
    compile_them(tmp_path / ".cache" / "flashinfer" / "0.6.14", "89", PLAIN, "cascade")
    assert [module.compute_capability for module in compiled_modules()] == [(8, 0)]


@pytest.mark.parametrize(
    ("installed", "num_found"), [("0.6.14", 1), ("0.6.18.post1", 1), ("0.7.2.post1", 0)]
)
def test_modules_of_unknown_versions_are_ignored(
    installed: str, num_found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenspeed_kernels_flashinfer.compiled.version", lambda name: installed)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    compile_them(tmp_path / ".cache" / "flashinfer" / installed, "80", PLAIN)
    assert len(compiled_modules()) == num_found


def test_compile_command_rejects_unknown_versions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "tokenspeed_kernels_flashinfer.__main__.version", lambda name: "0.7.2.post1"
    )
    with pytest.raises(SystemExit):
        main(["--head-size", "128"])
    assert "flashinfer-python 0.7.2.post1 uses module names" in capsys.readouterr().err


def test_compile_command_needs_something_to_compile(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "Give --head-size, --experts, or both" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("capability", "name"),
    [((9, 0), "sm90"), ((10, 3), "sm103"), ((11, 0), "sm100"), ((12, 1), "sm120")],
)
def test_compile_command_builds_the_experts_of_a_device(
    capability: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = ModuleType("flashinfer.fused_moe")
    library.__dict__[f"gen_cutlass_fused_moe_{name}_module"] = lambda: name
    monkeypatch.setitem(sys.modules, library.__name__, library)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert experts_module() == name


def test_compile_command_builds_missing_modules() -> None:
    compiled = []

    class Spec:
        def __init__(self, name: str, *, is_aot: bool = False) -> None:
            self.name, self.is_aot = name, is_aot

        def build(self, *, verbose: bool, need_lock: bool) -> None:
            assert need_lock, "another process may compile it, too"
            compiled.append(self.name)

    assert build([Spec("two"), Spec("one"), Spec("one"), Spec("ready", is_aot=True)]) == [
        "one",
        "ready",
        "two",
    ]
    assert sorted(compiled) == ["one", "two"], "each once"


def test_it_can_serve_a_single_phase() -> None:
    catalog = Catalog.discover()
    wishes = [
        Override.parse("attention.prefill", ("triton",)),
        Override.parse("attention.decode", ("flashinfer",)),
    ]
    chosen = Selector(
        installed_kernels(catalog),
        PlatformInfo("cuda", (9, 0), "H200"),
        wishes,
        module_exists=lambda name: True,
    )
    taken = {
        phase: chosen.select_attention(problem(phase)).spec.backend
        for phase in ("prefill", "decode")
    }
    assert taken == {"prefill": "triton", "decode": "flashinfer"}
