"""The machine code of latent attention for compute capability 9.0, compiled as when a kernel is bound."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.mla import absorbed
from tokenspeed_kernels.triton.mla.absorbed import FEW, MANY, SHARED, Tiling

SHARED_BYTES = 227 * 1024  # of a program
DEVICE = 2000  # that no other test uses, because Triton caches kernels by device


@pytest.mark.parametrize(
    ("kilobytes", "expected"), [(227, SHARED[0]), (163, MANY), (99, FEW), (48, FEW)]
)
def test_tiles_of_shared_entries_fit_the_device(kilobytes: int, expected: Tiling) -> None:
    assert absorbed.fitting_tiling(kilobytes * 1024, 576) == expected


@pytest.mark.parametrize(
    "kv_dtype", ["bfloat16", pytest.param("float8_e4m3fn", marks=pytest.mark.release)]
)
def test_decode_of_deepseek_compiles(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: dict[str, list[Any]] = {}
    compile_now = triton.compiler.compile

    def note(src: Any, **options: Any) -> Any:
        code = compile_now(src, **options)
        codes.setdefault(src.name, []).append(code)
        return code

    target = SimpleNamespace(
        get_current_device=lambda: DEVICE + len(kv_dtype),
        get_current_stream=lambda _: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        launcher_cls=lambda *_: None,
    )
    monkeypatch.setattr("triton.compiler.compile", note)
    monkeypatch.setattr(driver, "_active", target)
    monkeypatch.setattr(precompile, "is_possible", lambda: True)
    monkeypatch.setattr(precompile, "num_processors", lambda: 2)
    monkeypatch.setattr(absorbed, "supports_pdl", lambda: True)
    absorbed.mla_decode(
        {
            "phase": "decode",
            "num_heads": 16,
            "latent_size": 512,
            "rope_size": 64,
            "block_size": 64,
            "dtype": "bfloat16",
            "kv_dtype": kv_dtype,
        }
    )
    for thread in threading.enumerate():
        if thread.name == "precompile":
            thread.join(timeout=60)
    # Rows that are not split, that are, and those that share a prefix.
    assert {name: len(each) for name, each in codes.items()} == {
        "attend": 3,
        "attend_shared": 1,
        "merge": 2,
    }
    assert all(code.metadata.shared <= SHARED_BYTES for each in codes.values() for code in each)
    (shared,) = codes["attend_shared"]
    assert absorbed.fitting_tiling(shared.metadata.shared - 1, 576) != SHARED[0]
    assert "wgmma.mma_async" in shared.asm["ptx"], "tiles of 64 rows use Hopper's instructions"
    assert "griddepcontrol.wait" in shared.asm["ptx"]
