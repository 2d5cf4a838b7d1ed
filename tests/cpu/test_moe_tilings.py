"""Tilings of experts for the shared memory of different devices."""

from __future__ import annotations

from importlib import import_module
from itertools import count
from math import inf
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from tokenspeed_core.api import KernelSpec
from tokenspeed_kernels import descriptors
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.moe import biased_experts, experts_w4a16, tuned
from tokenspeed_kernels.triton.moe.tilings import Gemm, Tiling, fitting_tilings, supports_tma
from tokenspeed_kernels.triton.moe.tuned import tuned_tilings

ADA, HOPPER = ((8, 9), 100 * 1024), ((9, 0), 228 * 1024)  # bytes per multiprocessor
BLACKWELL = (10, 0), 228 * 1024
PROBLEM = {
    "num_experts": 8,
    "top_k": 2,
    "hidden_size": 256,
    "intermediate_size": 128,
    "dtype": "bfloat16",
}
DEVICES = count(2000)  # a new device per test, because Triton caches kernels by device
SPECS = {spec.op: spec for spec in descriptors.TRITON_MOE}


@pytest.fixture
def tiling_file(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return import_module("tiling_file")


def use_device(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], num_bytes: int
) -> None:
    device = SimpleNamespace(major=capability[0], shared_memory_per_multiprocessor=num_bytes)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


def compile_kernels(
    monkeypatch: pytest.MonkeyPatch,
    op: str,
    module: str,
    device: tuple[tuple[int, int], int],
    **changed: Any,
) -> list[Any]:
    """Return the machine code of the kernels of a module that an op compiles for a device when it is bound."""
    spec: KernelSpec = SPECS[op]
    assert (spec.capability.min_compute_capability or (0, 0)) <= device[0]
    compile_code, found, index = triton.compile, {}, next(DEVICES)

    def compile_grouped(source: Any, **options: Any) -> Any:
        if source.fn.fn.__module__.endswith(module):
            code = compile_code(source, **options)
            found[code.hash] = code
        return SimpleNamespace(src=source, metadata=None)

    major, minor = device[0]
    active = SimpleNamespace(
        get_current_device=lambda: index,
        get_current_stream=lambda _: 0,
        get_current_target=lambda: GPUTarget("cuda", 10 * major + minor, 32),
        launcher_cls=lambda *_: None,
    )
    use_device(monkeypatch, *device)
    monkeypatch.setattr("triton.compiler.compile", compile_grouped)
    monkeypatch.setattr(driver, "_active", active)
    monkeypatch.setattr(precompile, "is_possible", lambda: True)
    monkeypatch.setattr(precompile._THREADS, "put", lambda _, task: task())
    spec.factory()({**PROBLEM, **changed})
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("op", ["moe_experts", "moe_experts_fp8", "moe_experts_fp8_block"])
def test_every_tile_fits_on_compute_capability_8_9(
    monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    codes = compile_kernels(monkeypatch, op, "moe.gemm_kernel", ADA)
    assert max(code.metadata.shared for code in codes) <= ADA[1] - 1024


@pytest.mark.release
@pytest.mark.parametrize("device", [HOPPER, BLACKWELL], ids=["9.0", "10.0"])
def test_every_tile_of_mxfp4_experts_fits(
    monkeypatch: pytest.MonkeyPatch, device: tuple[tuple[int, int], int]
) -> None:
    codes = compile_kernels(monkeypatch, "moe_experts_mxfp4", "moe.experts_w4a16", device)
    assert len(codes) == 2 * len(tuned_tilings("moe_experts_mxfp4", experts_w4a16.Tiling))
    assert max(code.metadata.shared for code in codes) <= device[1] - 1024


@pytest.mark.release
@pytest.mark.parametrize("device", [HOPPER, BLACKWELL], ids=["9.0", "10.0"])
def test_many_pairs_are_loaded_by_tma(
    monkeypatch: pytest.MonkeyPatch, device: tuple[tuple[int, int], int]
) -> None:
    codes = compile_kernels(monkeypatch, "moe_experts", "moe.tma_kernel", device)
    assert {code.metadata.name for code in codes} == {"gate_up", "down"}
    assert all("cp.async.bulk.tensor" in code.asm["ptx"] for code in codes)
    assert max(code.metadata.shared for code in codes) <= device[1] - 1024


@pytest.mark.parametrize(
    ("capability", "itemsize", "sizes", "expected"),
    [
        ((9, 0), 2, (256, 128), True),
        ((8, 9), 2, (256, 128), False),
        ((9, 0), 4, (256, 128), False),
        ((9, 0), 2, (256, 132), False),
    ],
    ids=["", "no TMA", "float32", "rows of 264 bytes"],
)
def test_tma_needs_a_device_and_aligned_rows(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    itemsize: int,
    sizes: tuple[int, int],
    expected: bool,
) -> None:
    use_device(monkeypatch, capability, HOPPER[1])
    assert supports_tma(itemsize, *sizes) is expected


@pytest.mark.release
@pytest.mark.parametrize(
    ("op", "size"), [("moe_experts_mxfp4", 2048), ("moe_biased_experts_mxfp4", 2880)]
)
def test_few_tokens_load_packed_weights_in_16_bytes(
    monkeypatch: pytest.MonkeyPatch, op: str, size: int
) -> None:
    sizes = {"num_experts": 128, "hidden_size": size, "intermediate_size": size}
    codes = compile_kernels(
        monkeypatch, op, "few_tokens_w4_kernel", HOPPER, **sizes, alpha=1.7, limit=7.0
    )
    assert len(codes) == 2
    for code in codes:
        loads = [line for line in code.asm["ptx"].splitlines() if "evict_first" in line]
        loads = [line for line in loads if "ld.global" in line]
        assert len(loads) == 8
        assert all(".v4.b32" in line for line in loads)


@pytest.mark.parametrize(
    ("op", "itemsize", "num_left"),
    [
        ("moe_experts", 2, [2, 3]),
        ("moe_experts_fp8", 1, [4, 5]),
        ("moe_experts_fp8_block", 1, [3, 4]),
    ],
)
def test_neighbours_replace_tilings_that_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, op: str, itemsize: int, num_left: list[int]
) -> None:
    tilings = tuned_tilings(op, Tiling.of)
    for device, expected in zip((ADA, HOPPER), num_left, strict=True):
        use_device(monkeypatch, *device)
        found = fitting_tilings(tilings, itemsize)
        assert len(found) == expected
        assert {tiling for _, tiling in found} <= {tiling for _, tiling in tilings}
        assert found[-1][0] == float("inf")
    assert found == tilings


@pytest.mark.parametrize("order", ["joined", "tma"])
def test_one_operand_of_gate_and_up_cannot_be_first(order: str) -> None:
    with pytest.raises(ValueError, match="weights_first=False"):
        Gemm(64, 128, 4, 4, weights_first=True, **{order: True})


def test_tilings_without_kernels_are_refused() -> None:
    gemm = Gemm(64, 128, 4, 4)
    with pytest.raises(ValueError, match="at least 32"):
        Tiling(16, gemm, gemm, halves=True)
    with pytest.raises(ValueError, match="requires joined"):
        Tiling(32, Gemm(64, 128, 4, 4, tma=True), gemm)


# The factory of tilings, and a tiling that is not in the default table.
NEW: dict[str, tuple[Any, Any]] = {
    "moe_experts": (Tiling.of, Tiling(16, Gemm(32, 64, 2, 2), Gemm(32, 64, 2, 2, together=3))),
    "moe_experts_w4a16": (experts_w4a16.Tiling, experts_w4a16.Tiling(32, 16, 2, 2)),
    "moe_biased_experts": (biased_experts.Tiling, biased_experts.Tiling(16, 32, 32, 64, 2, 2)),
}


@pytest.mark.parametrize("op", NEW)
def test_kernels_use_the_table_of_the_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiling_file: ModuleType, op: str
) -> None:
    make, new = NEW[op]
    default, path = tuned_tilings(op, make), tmp_path / "tuned.json"
    tiling_file.update(path, ADA[0], {op: ((24.0, new), (inf, new))})
    tiling_file.update(path, (7, 5), {op: default[:1]})  # keeps the other tables
    monkeypatch.setattr(tuned, "FILE", path)
    use_device(monkeypatch, *HOPPER)
    assert tuned_tilings(op, make) == default
    use_device(monkeypatch, *ADA)
    assert tuned_tilings(op, make) == ((24.0, new), (inf, new))

    bounds: list[float] = []
    module = import_module(SPECS[op].load.partition(":")[0])
    monkeypatch.setattr(
        module, "blank_routings", lambda _, averages, *__: bounds.extend(averages) or ()
    )
    monkeypatch.setattr(module.precompile, "compile_for", lambda *_: None)
    SPECS[op].factory()({**PROBLEM, "group_size": 128, "alpha": 1.0, "limit": 7.0})
    assert set(bounds) == {24.0}


def test_file_of_tilings_is_unchanged_by_reading_and_writing(tiling_file: ModuleType) -> None:
    tables = tuned.read_tables(tuned.FILE)
    assert tiling_file.text_of(tables) == tuned.FILE.read_text(encoding="utf-8")
    rows = tables["moe_experts"]["default"]
    assert tiling_file.rows_of(tuned_tilings("moe_experts", Tiling.of)) == rows
    # Experts with static scales use the tables of dynamic ones.
    assert {op for op in SPECS if "experts" in op} == {
        *tables,
        *(f"moe_experts_{dtype}_static" for dtype in ("fp8", "int8")),
    }


def test_best_tiling_of_a_range_is_chosen(tiling_file: ModuleType) -> None:
    table = ((8.0, "old"), (24.0, "old"), (inf, "old"))
    times = [
        (4.0, {"old": 2.0, "fast": 1.0, "once": 0.1}),
        (8.0, {"old": 3.0, "fast": 2.0}),
        (30.0, {"old": 1.0, "fast": 2.0}),
    ]
    assert list(tiling_file.tuned_table(table, times)) == [
        (8.0, "fast"),
        (24.0, "old"),
        (inf, "old"),
    ]
