"""Block-scaled linear layers: the reference, the kernel's machine code for compute capability 10.0, and selection."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from machine_code import REGISTERS, SHARED_BYTES, TENSOR_COLUMNS, compiled
from tokenspeed_kernels_blackwell import TORCH_BLOCKS
from tokenspeed_kernels_blackwell.linear.block_scaled import (
    BLOCK_K,
    BLOCK_N,
    MXFP8,
    NVFP4,
    TILINGS,
    Format,
    Tiling,
)
from tokenspeed_kernels_blackwell.linear.block_scaled_kernel import multiply
from tokenspeed_kernels_blackwell.linear.reference import (
    E2M1,
    mxfp8_rows,
    mxfp8_values,
    nvfp4_rows,
    nvfp4_values,
)
from tokenspeed_testing.conformance import check
from tokenspeed_testing.explain import explain

from tokenspeed_core.api.kernels import KernelSpec, PlatformInfo
from tokenspeed_core.kernels.installed import installed_kernels, installed_ops
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.plugins import Catalog

CPU = torch.device("cpu")
SCALED = {MXFP8: "kind::mxf8f6f4.block_scale.block32", NVFP4: "kind::mxf4nvf4.block_scale.block16"}


@pytest.mark.parametrize("spec", TORCH_BLOCKS, ids=lambda spec: spec.op)
def test_reference_conforms(spec: KernelSpec) -> None:
    assert check(spec, CPU) > 10


def test_mxfp8_scale_is_the_smallest_that_fits() -> None:
    x = torch.zeros(1, 6 * 32)
    for group, largest in enumerate((448.0, 449.0, 224.0, 0.0, 1e-38, 3e38)):
        x[0, 32 * group + 5] = -largest
    codes, scale = mxfp8_rows(x)
    assert scale.tolist()[0][:4] == [127, 128, 126, 0]
    assert codes.float().abs().max() <= 448
    torch.testing.assert_close(mxfp8_values(codes, scale), x, rtol=2**-4, atol=1e-39)


def test_mxfp8_error_is_below_one_sixteenth() -> None:
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    rounded = mxfp8_values(*mxfp8_rows(x))
    assert ((rounded - x).abs() <= x.abs() / 16 + x.abs().amax() * 2**-16).all()


def test_e2m1_values_round_trip_and_ties_round_to_even() -> None:
    one = torch.ones(1)
    held = torch.tensor([E2M1, tuple(-value for value in E2M1)]).flatten().view(1, 16)
    assert torch.equal(nvfp4_values(*nvfp4_rows(held, one)), held)
    between = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, *[0.0] * 8]])
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert nvfp4_values(*nvfp4_rows(between, one))[0, :8].tolist() == expected


def test_nvfp4_group_scale_is_rounded_to_e4m3() -> None:
    x = torch.zeros(1, 32)
    x[0, 3], x[0, 20] = 2688.0, 6.5
    codes, group_scale = nvfp4_rows(x, torch.tensor([0.5]))
    # 2688 / 6 / 0.5 saturates; 6.5 / 6 / 0.5 is rounded.
    assert group_scale.float().tolist() == [[448.0, 2.25]]
    assert codes[0, 1].item() >> 4 == 7, "the second value is in the high bits"
    assert codes[0, 10].item() & 15 == 7


@pytest.mark.parametrize("capability", [100, pytest.param(103, marks=pytest.mark.release)])
@pytest.mark.parametrize("tiling", TILINGS, ids=lambda tiling: f"{tiling.block_t} tokens")
@pytest.mark.parametrize("form", [MXFP8, NVFP4], ids=lambda form: form.name)
def test_gemm_uses_block_scaled_tensor_cores(
    form: Format, tiling: Tiling, capability: int, tmp_path: Path
) -> None:
    value, scale = ("fp8e4nv", "u8") if form is MXFP8 else ("u8", "fp8e4nv")
    signature = {
        "x_ptr": f"*{value}",
        "x_scale_ptr": f"*{scale}",
        "w_ptr": f"*{value}",
        "w_scale_ptr": f"*{scale}",
        "scale_ptr": "*fp32",
        "bias_ptr": "*bf16",
        "y_ptr": "*bf16",
        **dict.fromkeys(("x_stride", "x_scale_stride", "num_rows", "N"), "i32"),
    }
    constants = {
        "K": 4096,
        "FORMAT": form.name,
        "PACKED": form.packed,
        "GROUP": form.group,
        "HAS_SCALE": form is NVFP4,
        "HAS_BIAS": True,
        "BLOCK_N": BLOCK_N,
        "BLOCK_T": tiling.block_t,
        "BLOCK_K": BLOCK_K,
    }
    code = compiled(
        multiply,
        signature,
        constants,
        tmp_path,
        capability=capability,
        aligned=tuple(name for name in signature if name not in ("scale_ptr", "num_rows")),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    assert code.count(f"tcgen05.mma.cta_group::1.{SCALED[form]}") > 0
    assert code.count("mma.sync") == 0
    assert code.stack_bytes == 0, "registers are spilled"
    assert code.num_registers * 32 * tiling.num_warps <= REGISTERS
    assert code.shared_bytes <= SHARED_BYTES
    assert code.tensor_columns <= TENSOR_COLUMNS


@pytest.mark.parametrize("op", ["linear_mxfp8", "linear_nvfp4"])
def test_block_scaled_kernel_is_selected_on_blackwell_only(
    op: str,
) -> None:
    catalog = Catalog.discover()
    problem = {"in_size": 4096, "out_size": 1024, "dtype": "bfloat16"}
    for capability, backend in (((10, 0), "blackwell"), ((9, 0), "torch-blocks")):
        chosen = Selector(
            installed_kernels(catalog),
            PlatformInfo("cuda", capability),
            ops=installed_ops(catalog),
            needs=frozenset({"graph_safe"}),
        )
        assert chosen.select(op, problem).spec.backend == backend
    assert "compute capability 9.0 is not supported" in explain(chosen.plan(), op)
