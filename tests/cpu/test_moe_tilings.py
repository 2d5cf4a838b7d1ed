"""Tilings of experts for the shared memory of different devices."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from tokenspeed_core.api import KernelSpec
from tokenspeed_kernels import descriptors
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.moe import experts, experts_w8a8
from tokenspeed_kernels.triton.moe.tilings import Gemm, fitting_tilings

ADA, HOPPER = ((8, 9), 100 * 1024), ((9, 0), 228 * 1024)  # bytes per multiprocessor
PROBLEM = {
    "num_experts": 8,
    "top_k": 2,
    "hidden_size": 256,
    "intermediate_size": 128,
    "dtype": "bfloat16",
}
DEVICES = count(2000)  # a new device per test, because Triton caches kernels by device
SPECS = {spec.op: spec for spec in descriptors.TRITON_MOE}


def use_device(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], num_bytes: int
) -> None:
    device = SimpleNamespace(major=capability[0], shared_memory_per_multiprocessor=num_bytes)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["moe_experts", "moe_experts_fp8", "moe_experts_fp8_block"])
def test_every_tile_fits_on_compute_capability_8_9(
    monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    spec: KernelSpec = SPECS[op]
    assert (spec.capability.min_compute_capability or (0, 0)) <= ADA[0]
    compile_code, found, device = triton.compile, {}, next(DEVICES)

    def compile_grouped(source: Any, **options: Any) -> Any:
        if source.fn.fn.__module__.endswith("moe.gemm_kernel"):
            code = compile_code(source, **options)
            found[code.hash] = code.metadata.shared
        return SimpleNamespace(src=source, metadata=None)

    active = SimpleNamespace(
        get_current_device=lambda: device,
        get_current_stream=lambda _: 0,
        get_current_target=lambda: GPUTarget("cuda", 89, 32),
        launcher_cls=lambda *_: None,
    )
    use_device(monkeypatch, *ADA)
    monkeypatch.setattr("triton.compiler.compile", compile_grouped)
    monkeypatch.setattr(driver, "_active", active)
    monkeypatch.setattr(precompile, "is_possible", lambda: True)
    monkeypatch.setattr(precompile._THREADS, "put", lambda _, task: task())
    spec.factory()(PROBLEM)
    assert max(found.values()) <= ADA[1] - 1024


@pytest.mark.parametrize(
    ("tilings", "itemsize", "num_left"),
    [
        (experts.TILINGS, 2, [2, 4]),
        (experts_w8a8.TILINGS, 1, [4, 5]),
        (experts_w8a8.BLOCK_TILINGS, 1, [4, 5]),
    ],
)
def test_neighbours_replace_tilings_that_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, tilings: Any, itemsize: int, num_left: list[int]
) -> None:
    for device, expected in zip((ADA, HOPPER), num_left, strict=True):
        use_device(monkeypatch, *device)
        found = fitting_tilings(tilings, itemsize)
        assert len(found) == expected
        assert {tiling for _, tiling in found} <= {tiling for _, tiling in tilings}
        assert found[-1][0] == float("inf")
    assert found == tilings


def test_joined_weights_cannot_be_first() -> None:
    with pytest.raises(ValueError, match="weights_first=False"):
        Gemm(64, 128, 4, 4, weights_first=True, joined=True)
