"""MLA decode: the kernel's machine code, and selection."""

from __future__ import annotations

from pathlib import Path

import pytest
from machine_code import REGISTERS, SHARED_BYTES, TENSOR_COLUMNS, compiled
from tokenspeed_kernels_blackwell.mla.decode import FEW, MANY, NUM_STAGES, TAIL, Tiling
from tokenspeed_kernels_blackwell.mla.decode_kernel import attend, merge
from tokenspeed_testing.explain import explain

from tokenspeed_core.api.kernels import PlatformInfo
from tokenspeed_core.errors import SelectionError
from tokenspeed_core.kernels.installed import installed_kernels, installed_ops
from tokenspeed_core.kernels.overrides import Override
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.plugins import Catalog

DEEPSEEK = {
    "phase": "decode",
    "num_heads": 128,
    "latent_size": 512,
    "rope_size": 64,
    "block_size": 64,
    "dtype": "bfloat16",
    "kv_dtype": "bfloat16",
}


def selector(capability: tuple[int, int], *backends: str) -> Selector:
    catalog = Catalog.discover()
    wanted = [Override.parse("attention", backends)] if backends else []
    return Selector(
        installed_kernels(catalog),
        PlatformInfo("cuda", capability),
        wanted,
        ops=installed_ops(catalog),
        needs=frozenset({"graph_safe"}),
        module_exists=lambda name: True,
    )


@pytest.mark.parametrize("num_heads", [16, 64, 128])
def test_auto_selects_the_kernel_without_a_library(num_heads: int) -> None:
    problem = {**DEEPSEEK, "num_heads": num_heads}
    for names, taken in (((), "blackwell"), (("trtllm_mla",), "trtllm_mla")):
        chosen = selector((10, 3), *names)
        assert chosen.select("mla_decode", problem).spec.backend == taken
        text = explain(chosen.plan(), "mla_decode")
        compiled = text.count("must be compiled before the first call")
        assert compiled == (1 if names else 2)  # the two libraries, unless one is named


def test_unsupported_shapes_are_rejected_at_build() -> None:
    for axis, value, reason in (
        ("num_heads", 96, "num_heads 96 is above 64"),
        ("block_size", 16, "block_size 16 is not supported"),
        ("latent_size", 256, "latent_size 256 is below 512"),
        ("dtype", "float16", "dtype float16 is not supported"),
    ):
        with pytest.raises(SelectionError, match=reason):
            selector((10, 0), "trtllm_mla").select("mla_decode", {**DEEPSEEK, axis: value})
    chosen = selector((9, 0))
    assert chosen.select("mla_decode", DEEPSEEK).spec.backend == "triton"
    assert "compute capability 9.0 is not supported" in explain(chosen.plan(), "mla_decode")


@pytest.mark.parametrize("capability", [100, pytest.param(103, marks=pytest.mark.release)])
@pytest.mark.parametrize("tiling", [FEW, MANY], ids=lambda tiling: f"{tiling.block_h} heads")
def test_mla_kernel_fits_and_uses_tcgen05(tiling: Tiling, capability: int, tmp_path: Path) -> None:
    dtype = "bf16" if capability == 100 else "fp16"
    boxes = {
        f"{name}_desc": f"tensordesc<{dtype}[1, {size}, {width}]>"
        for end, size in (("", 64), ("_tail", TAIL))
        for name, width in ((f"latent{end}", 512), (f"rope{end}", 64))
    }
    signature = {
        "q_ptr": f"*{dtype}",
        **boxes,
        "part_ptr": "*fp32",
        "lse_ptr": "*fp32",
        "seq_lens_ptr": "*i32",
        "table_ptr": "*i32",
        "log2_scale": "fp32",
        **dict.fromkeys(("q_stride_t", "q_stride_h", "table_stride"), "i32"),
    }
    constants = {
        "H": 4 * tiling.block_h,
        "L": 512,
        "R": 64,
        "BLOCK_SIZE": 64,
        "BLOCK_H": tiling.block_h,
        "TAIL": TAIL,
    }
    code = compiled(
        attend,
        signature,
        constants,
        tmp_path,
        capability=capability,
        aligned=("q_ptr", "part_ptr", "lse_ptr", "q_stride_t", "q_stride_h"),
        num_warps=tiling.num_warps,
        num_stages=NUM_STAGES,
    )
    assert code.count("tcgen05.mma") > 0, "products on the tensor cores of this generation"
    assert code.count("cp.async.bulk.tensor") > 0, "the cache by the tensor memory accelerator"
    assert code.stack_bytes <= (0 if tiling is FEW else 16), "more than four registers are spilled"
    assert code.num_registers * 32 * tiling.num_warps <= REGISTERS
    assert code.shared_bytes <= SHARED_BYTES
    assert code.tensor_columns <= TENSOR_COLUMNS


def test_merge_kernel_compiles_without_spills(tmp_path: Path) -> None:
    signature = {"part_ptr": "*fp32", "lse_ptr": "*fp32", "y_ptr": "*bf16", "num_splits": "i32"}
    code = compiled(
        merge,
        signature,
        {"L": 512, "SPLITS": 32},
        tmp_path,
        capability=100,
        aligned=("part_ptr", "lse_ptr", "y_ptr"),
        num_warps=4,
        num_stages=3,
    )
    assert code.stack_bytes == 0
