"""The machine code of latent attention for compute capability 9.0, compiled as when a kernel is bound."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.mla import absorbed, prefill
from tokenspeed_kernels.triton.mla.absorbed import FEW, MANY, SHARED, Tiling, fitting_tiling
from tokenspeed_kernels.triton.mla.prefill import NARROW

DEEPSEEK: dict[str, Any] = {
    "num_heads": 16,
    "latent_size": 512,
    "rope_size": 64,
    "nope_size": 128,
    "value_size": 128,
    "block_size": 64,
    "dtype": "bfloat16",
    "kv_dtype": "bfloat16",
}
SHARED_BYTES = 227 * 1024  # of a program
DEVICE = 2000  # that no other test uses, because Triton caches kernels by device


Codes = dict[str, list[Any]]


@pytest.mark.parametrize(
    ("kilobytes", "expected"), [(227, SHARED[0]), (163, MANY), (99, FEW), (48, FEW)]
)
def test_tiles_of_shared_entries_fit_the_device(kilobytes: int, expected: Tiling) -> None:
    assert fitting_tiling(SHARED, kilobytes * 1024, 576, 576) == expected


@pytest.mark.parametrize(
    ("kilobytes", "nope_size", "value_size", "expected"),
    [
        (227, 128, 128, NARROW[0]),  # DeepSeek on an H100
        (163, 128, 128, NARROW[1]),
        (227, 192, 256, NARROW[1]),  # GLM-4.7-Flash on an H100
        (163, 192, 256, NARROW[2]),
        (99, 128, 128, NARROW[2]),
        (99, 192, 256, NARROW[3]),
    ],
)
def test_tiles_of_prefill_fit_the_device(
    kilobytes: int,
    nope_size: int,
    value_size: int,
    expected: Tiling,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill, "shared_memory", lambda: kilobytes * 1024)
    problem = {"nope_size": nope_size, "value_size": value_size, "dtype": "bfloat16"}
    assert prefill.MlaPrefill({**DEEPSEEK, **problem})._tiling == expected


@pytest.fixture
def compile_all(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], Any]], Codes]:
    """Return a function that binds a kernel on a device, and returns the compiled code by name."""

    def run(device: int, bind: Callable[[], Any]) -> Codes:
        codes: Codes = {}
        compile_now = triton.compiler.compile

        def note(src: Any, **options: Any) -> Any:
            code = compile_now(src, **options)
            codes.setdefault(src.name, []).append(code)
            return code

        target = SimpleNamespace(
            get_current_device=lambda: device,
            get_current_stream=lambda _: 0,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            launcher_cls=lambda *_: None,
        )
        monkeypatch.setattr("triton.compiler.compile", note)
        monkeypatch.setattr(driver, "_active", target)
        monkeypatch.setattr(precompile, "is_possible", lambda: True)
        monkeypatch.setattr(precompile, "num_processors", lambda: 2)
        monkeypatch.setattr(absorbed, "supports_pdl", lambda: True)
        bind()
        for thread in threading.enumerate():
            if thread.name == "precompile":
                thread.join(timeout=60)
        return codes

    return run


@pytest.mark.parametrize(
    "kv_dtype", ["bfloat16", pytest.param("float8_e4m3fn", marks=pytest.mark.release)]
)
def test_decode_of_deepseek_compiles(
    kv_dtype: str, compile_all: Callable[[int, Callable[[], Any]], Codes]
) -> None:
    problem = {**DEEPSEEK, "phase": "decode", "kv_dtype": kv_dtype}
    codes = compile_all(DEVICE + len(kv_dtype), lambda: absorbed.mla_decode(problem))
    # Rows that are not split, that are, and those that share a prefix.
    assert {name: len(each) for name, each in codes.items()} == {
        "attend": 3,
        "attend_shared": 1,
        "merge": 2,
    }
    assert all(code.metadata.shared <= SHARED_BYTES for each in codes.values() for code in each)
    (shared,) = codes["attend_shared"]
    assert fitting_tiling(SHARED, shared.metadata.shared - 1, 576, 576) != SHARED[0]
    assert "wgmma.mma_async" in shared.asm["ptx"], "tiles of 64 rows use Hopper's instructions"
    assert "griddepcontrol.wait" in shared.asm["ptx"]


@pytest.mark.release
@pytest.mark.parametrize(
    ("nope_size", "value_size", "num_bytes"), [(128, 128, 172_032), (192, 256, 229_376)]
)
def test_prefill_takes_the_shared_memory_that_its_tiles_need(
    nope_size: int,
    value_size: int,
    num_bytes: int,
    compile_all: Callable[[int, Callable[[], Any]], Codes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill, "shared_memory", lambda: SHARED_BYTES)
    problem = {**DEEPSEEK, "phase": "prefill", "nope_size": nope_size, "value_size": value_size}
    codes = compile_all(DEVICE + nope_size, lambda: prefill.mla_prefill(problem))
    assert max(code.metadata.shared for code in codes["attend"]) == num_bytes <= SHARED_BYTES
