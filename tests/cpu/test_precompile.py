"""Background compilation of kernels, with a stub of Triton's compiler and driver."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from tokenspeed_testing.conformance import make_inputs
from tokenspeed_testing.shapes import contract_of, problems
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import build
from triton.runtime.driver import driver

from tokenspeed_core.api import AttentionLimits, AttentionProblem, AttentionStep, KernelSpec
from tokenspeed_kernels import descriptors
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.attention.backend import attention
from tokenspeed_kernels.triton.linear.gated_gemm import gated_linear
from tokenspeed_kernels.triton.moe.experts import moe_experts

CPU = torch.device("cpu")
PRECOMPILED = (
    "rms_norm",
    "add_rms_norm",
    "silu_mul",
    "gelu_tanh_mul",
    "linear",
    "linear_silu_mul",
    "add_rms_norm_linear",
    "add_rms_norm_linear_silu_mul",
    "add_rms_norm_linear_gelu_tanh_mul",
    "fused_block",
    "rope_write_kv",
    "qk_norm_rope_write_kv",
    "greedy",
    "sample",
    "quantize_fp8",
    "add_rms_norm_fp8",
    "silu_mul_fp8",
    "linear_fp8",
    "quantize_linear_fp8",
    "add_rms_norm_linear_fp8",
    "add_rms_norm_mlp_fp8",
    "write_kv",
    "moe_route",
    "moe_logits",
    "moe_experts",
    "moe_experts_fp8",
    "moe_experts_fp8_block",
    "fused_block_in_place",
    "advance_rows",
    "map_tokens",
    "gather_tokens",
    "find_shared_prefix",
    "verify_drafts",
    "note_tokens",
    "mask_logits",
    "quantize_fp8_groups",
    "add_rms_norm_fp8_groups",
    "silu_mul_fp8_groups",
    "linear_fp8_block",
    "mla_absorb",
    "mla_project",
    "mla_write",
    "mla_decode",
    "mla_prefill",
    "linear_w4a16",
    "linear_mxfp4",
    "moe_experts_w4a16",
    "moe_experts_mxfp4",
    "moe_biased_experts",
    "moe_biased_experts_mxfp4",
    "linear_int8",
    "quantize_int8",
    "quantize_int8_static",
    "quantize_fp8_static",
    "moe_experts_int8",
    "moe_experts_int8_static",
    "moe_experts_fp8_static",
)
SPECS = [
    spec
    for name, specs in sorted(vars(descriptors).items())
    if name.startswith("TRITON_")
    for spec in specs
    if spec.op in PRECOMPILED
]
WARMED_UP = {
    "bias": None,
    "gate_up_bias": None,
    "down_bias": None,
    "gate_up_order": None,
    "down_order": None,
    "interleaved": False,
}
DEVICES = count(1000)  # a new device per test, because Triton caches kernels by device


class Compiler:
    """Stub of Triton's compiler and driver that records kernels and threads."""

    def __init__(self) -> None:
        self.compiled: list[tuple[str, str]] = []  # kernel, thread
        self.launchers: list[str] = []
        self.before: Callable[[], object] = lambda: None

    def __call__(self, src: Any, **options: Any) -> Any:
        self.compiled.append((src.name, threading.current_thread().name))
        self.before()
        return SimpleNamespace(
            src=src,
            metadata=None,
            packed_metadata=None,
            function=None,
            launch_metadata=lambda *_: None,
            run=lambda *_: None,
        )

    def driver(self) -> Any:
        """Return a driver for a device without compiled kernels."""
        device = next(DEVICES)
        return SimpleNamespace(
            get_current_device=lambda: device,
            get_current_stream=lambda _: 0,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            launcher_cls=lambda src, _: self.launchers.append(src.name),
        )

    def names(self) -> list[str]:
        return sorted(name for name, _ in self.compiled)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    compiler = Compiler()
    monkeypatch.setattr("triton.compiler.compile", compiler)
    monkeypatch.setattr(driver, "_active", compiler.driver())
    monkeypatch.setattr(precompile, "is_possible", lambda: True)
    monkeypatch.setattr(precompile, "num_processors", lambda: 3)
    yield compiler
    settle()


def settle() -> None:
    """Wait for the compiling threads."""
    for thread in threading.enumerate():
        if thread.name == "precompile":
            thread.join(timeout=60)


@precompile.jit
def one(x_ptr, N: tl.constexpr):
    tl.store(x_ptr, N)


@precompile.jit
def two(x_ptr, N: tl.constexpr):
    tl.store(x_ptr, N + 0.0 + 0.0 + 0.0 + 0.0 + 0.0 + 0.0 + 0.0 + 0.0)


@triton.jit
def long_helper(x_ptr, N: tl.constexpr):
    tl.store(x_ptr, N + 0.0 + 0.0 + 0.0 + 0.0 + 0.0 + 0.0 + 0.0 + 0.0)


@precompile.jit
def three(x_ptr, N: tl.constexpr):
    long_helper(x_ptr, N)
    long_helper(x_ptr, N)


def launch(x: Tensor, *sizes: int, kernel: Any = one) -> None:
    for size in sizes:
        kernel[(1,)](x, N=size)


@pytest.mark.parametrize(
    "spec", SPECS, ids=lambda spec: f"{spec.op} of {spec.load.partition(':')[0]}"
)
def test_factory_precompiles_every_launched_kernel(spec: KernelSpec, compiler: Compiler) -> None:
    contract = contract_of(spec)
    for problem in problems(spec):
        kernel = spec.factory()(problem)
        settle()
        found = compiler.names()
        assert len(found) == len(compiler.launchers)
        for num_rows in (1, 33, 65, 129):
            given = make_inputs(contract, problem, num_rows, CPU, strided=False)
            has_bias = spec.op == "moe_route" or spec.op.startswith("moe_biased")
            warmed_up = {} if has_bias else WARMED_UP
            kernel(*(warmed_up.get(name, value) for name, value in given.items()))
            assert compiler.names() == found, (
                f"{num_rows} rows launch a kernel that was not precompiled: {problem}"
            )
    assert found


@pytest.mark.parametrize("num_experts", [8, 128])
def test_experts_are_precompiled_for_any_number_of_tokens(
    compiler: Compiler, num_experts: int
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16}
    experts = moe_experts({"num_experts": num_experts, "top_k": 2, "dtype": "bfloat16", **sizes})
    settle()
    precompiled = compiler.names()
    weights = torch.zeros(num_experts, 32, 16), torch.zeros(num_experts, 16, 16)
    for num_tokens in (1, 4, 16, 40, 100, 300, 1000, 2048, 2049, 9000):
        x = torch.zeros(num_tokens, 16, dtype=torch.bfloat16)
        ids = torch.zeros(num_tokens, 2, dtype=torch.int32)
        experts(x, *(each.to(x.dtype) for each in weights), ids.float(), ids)
        assert compiler.names() == precompiled, f"not precompiled: {num_tokens} tokens"


def test_gated_gemm_is_precompiled_for_any_number_of_rows(
    compiler: Compiler,
) -> None:
    apply = gated_linear({"in_size": 64, "out_size": 96, "dtype": "bfloat16"})
    settle()
    for num_rows in (2048, 2051):
        apply(
            torch.zeros(num_rows, 64, dtype=torch.bfloat16),
            torch.zeros(192, 64, dtype=torch.bfloat16),
        )
    assert compiler.names() == ["_gated"]


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("num_heads", [8, 32])
@pytest.mark.parametrize(
    ("kv_dtype", "window"), [("bfloat16", None), ("float8_e4m3fn", None), ("bfloat16", 512)]
)
def test_attention_precompiles_every_variant_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
    compiler: Compiler,
    phase: str,
    num_heads: int,
    kv_dtype: str,
    window: int | None,
) -> None:
    monkeypatch.setattr("tokenspeed_kernels.triton.attention.backend.FALLBACK_MULTIPROCESSORS", 132)
    problem = AttentionProblem(phase, num_heads, 8, 128, "bfloat16", kv_dtype, 16, 0.1, window)
    limits = AttentionLimits(65, 2048, 8192, 512, max_drafts=8)
    backend = attention(problem, limits, CPU)
    settle()
    precompiled = compiler.names()
    k_cache, v_cache = torch.zeros(4, 6, 2, 16, 8, 128).to(getattr(torch, kv_dtype))[:, 2].unbind(1)
    chunks = [[1500], [40], [1] * 16 + [5], [2], [1, 4]] if phase == "prefill" else []
    rows = [[1] * num_rows for num_rows in (1, 2, 8, 20, 33, 48, 64)]
    if phase == "decode":
        rows += [[5], [9], *([9] * num_rows for num_rows in (2, 16, 64))]
    forms = [
        (*bound, overlaps)
        for bound in ((True, 8192), (True, 4000), (False, 4096))
        for overlaps in (False, True)
    ]
    for counts, (shares, longest, overlaps_prefill) in product([*rows, *chunks], forms):
        starts = torch.tensor([0, *counts]).cumsum(0).tolist()
        qkv = torch.zeros(starts[-1], num_heads + 16, 128, dtype=torch.bfloat16)
        backend.prepare(
            AttentionStep(
                len(counts),
                starts[-1],
                max(counts),
                longest,
                torch.tensor(starts, dtype=torch.int32),
                torch.tensor(counts, dtype=torch.int32),
                torch.zeros(len(counts), 512, dtype=torch.int32),
                tuple(starts),
                None,
                shares,
                overlaps_prefill,
            )
        )
        for layer in (0, 1):
            backend.forward(
                qkv[:, :num_heads], k_cache, v_cache, torch.empty_like(qkv[:, :num_heads])
            )
            assert compiler.names() == precompiled, (
                f"not precompiled: {counts}, {shares}, layer {layer}"
            )
    assert "attend" in precompiled


@pytest.mark.parametrize(("max_drafts", "num_compiled"), [(0, 15), (8, 22)])
def test_attention_of_a_model_compiles_few_variants(
    monkeypatch: pytest.MonkeyPatch, compiler: Compiler, max_drafts: int, num_compiled: int
) -> None:
    # Each variant takes seconds of a start. These are the sizes of Qwen3-8B on an H200, with and without drafts.
    monkeypatch.setattr("tokenspeed_kernels.triton.attention.backend.FALLBACK_MULTIPROCESSORS", 132)
    limits = AttentionLimits(256, 8192, 40960, 2560, max_drafts)
    for phase in ("prefill", "decode"):
        problem = AttentionProblem(phase, 32, 8, 128, "bfloat16", "bfloat16", 16, 0.1, None)
        attention(problem, limits, CPU)
    settle()
    assert len(compiler.compiled) == num_compiled, compiler.names()


def test_launch_waits_for_a_running_compilation(
    compiler: Compiler,
) -> None:
    began, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        may_end.wait(60)

    compiler.before = wait
    precompile.compile_for(launch, precompile.blank("float32", 4), 1)
    assert began.wait(60)
    launching = threading.Thread(target=launch, args=(torch.zeros(4), 1))
    launching.start()
    time.sleep(0.05)
    assert launching.is_alive()
    may_end.set()
    launching.join(timeout=60)
    assert not launching.is_alive()
    assert compiler.compiled == [("one", "precompile")]


def test_launch_compiles_unstarted_kernels(compiler: Compiler) -> None:
    may_end = threading.Event()
    compiler.before = lambda: (
        threading.current_thread() is threading.main_thread() or may_end.wait(60)
    )
    # Two threads begin two of three kernels.
    precompile.compile_for(launch, precompile.blank("float32", 4), 1, 2, 3)
    launch(torch.zeros(4), 3)
    may_end.set()
    settle()
    launch(torch.zeros(4), 1, 2, 3)
    assert sorted(thread for _, thread in compiler.compiled) == [
        "MainThread",
        "precompile",
        "precompile",
    ]


def test_longest_kernel_is_compiled_first(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precompile, "num_processors", lambda: 2)
    may_end = threading.Event()
    compiler.before = lambda: may_end.wait(60)
    x = precompile.blank("float32", 4)
    precompile.compile_for(launch, x, 1, 2, 3)
    precompile.compile_for(lambda: launch(x, 1, 2, kernel=two))
    precompile.compile_for(lambda: launch(x, 1, kernel=three))
    may_end.set()
    settle()
    assert [name for name, _ in compiler.compiled] == ["one", "three", "two", "two", "one", "one"]


def test_compiler_errors_are_raised_at_launch(compiler: Compiler) -> None:
    def fail() -> None:
        raise ValueError(f"no such instruction in {threading.current_thread().name}")

    compiler.before = fail
    precompile.compile_for(launch, precompile.blank("float32", 4), 1)
    settle()
    for _ in range(2):
        with pytest.raises(ValueError, match="MainThread"):
            launch(torch.zeros(4), 1)


def test_threads_end_when_idle(compiler: Compiler) -> None:
    usual, intervals = sys.getswitchinterval(), list[float]()
    compiler.before = lambda: intervals.append(sys.getswitchinterval())
    precompile.compile_for(launch, precompile.blank("float32", 4), *range(20))
    settle()
    assert len(compiler.compiled) == 20
    assert not [thread for thread in threading.enumerate() if thread.name == "precompile"]
    assert intervals == pytest.approx([precompile.SWITCH_INTERVAL] * 20)
    assert sys.getswitchinterval() == usual


@pytest.mark.parametrize(("has_device", "num_processors"), [(False, 8), (True, 1)])
def test_precompile_needs_a_device_and_two_cpus(
    monkeypatch: pytest.MonkeyPatch, has_device: bool, num_processors: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_device)
    monkeypatch.setattr(precompile, "num_processors", lambda: num_processors)
    precompile.compile_for(lambda: pytest.fail("it was launched"))


def test_process_exit_drops_queued_compilations() -> None:
    code = """
import time
from tokenspeed_kernels.triton import precompile
precompile.num_processors = lambda: 3
for _ in range(200):
    precompile._THREADS.put(1, lambda: time.sleep(0.5))
print("ends", flush=True)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=40, check=True
    )
    assert ended.stdout == "ends\n"
    assert not ended.stderr


def test_interpreter_gets_plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert type(precompile.jit(one.fn)) is type(triton.jit(one.fn))


def test_factories_import_no_compiler_of_torch() -> None:
    # Arithmetic with meta tensors imports it, for seconds.
    code = """
import sys
import triton
from test_precompile import SPECS, Compiler, driver, precompile, problems

triton.compiler.compile = compiler = Compiler()
driver._active, precompile.is_possible = compiler.driver(), lambda: True
for spec in SPECS:
    spec.factory()(next(iter(problems(spec))))
print([name for name in ("sympy", "torch._dynamo") if name in sys.modules])
"""
    folder = str(Path(__file__).parent)
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONPATH": folder},
    )
    assert ended.stdout == "[]\n"


LAUNCHER = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *unused) { return PyLong_FromLong(RESULT); }
static PyMethodDef methods[] = {{"launch", launch, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&module); }
"""


@pytest.mark.skipif(
    shutil.which("cc") is None or not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="needs a C compiler and the headers of Python",
)
def test_loading_a_launcher_again_does_not_change_others(tmp_path: Path) -> None:
    name, paths = "__triton_launcher", []
    for result in range(2):
        source, path = tmp_path / f"{result}.c", tmp_path / str(result) / f"{name}.so"
        source.write_text(LAUNCHER.replace("RESULT", str(result)))
        path.parent.mkdir()
        headers = f"-I{sysconfig.get_path('include')}"
        subprocess.run(["cc", source, "-shared", "-fPIC", headers, "-o", path], check=True)
        paths.append(str(path))
    launchers = [build._load_module_from_path(name, paths[i]) for i in (0, 1, 0)]
    assert [each.launch() for each in launchers] == [0, 1, 0]
