"""Block-scaled experts: the reference, the kernels' machine code for compute capability 10.0, and selection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from machine_code import REGISTERS, SHARED_BYTES, TENSOR_COLUMNS, compiled
from tokenspeed_kernels_blackwell import MOE, TORCH_MOE
from tokenspeed_kernels_blackwell.linear.block_scaled import (
    BLOCK_K,
    BLOCK_N,
    MXFP8,
    NVFP4,
    Format,
    Tiling,
)
from tokenspeed_kernels_blackwell.linear.reference import (
    mxfp8_rows,
    mxfp8_values,
    nvfp4_rows,
    nvfp4_values,
)
from tokenspeed_kernels_blackwell.moe.experts import TILINGS
from tokenspeed_kernels_blackwell.moe.experts_kernel import down, gate_up
from tokenspeed_testing.conformance import check, make_inputs
from tokenspeed_testing.explain import explain
from tokenspeed_testing.shapes import contract_of
from torch import Tensor

from tokenspeed_core.api.kernels import KernelSpec, PlatformInfo
from tokenspeed_core.kernels.installed import installed_kernels, installed_ops
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.plugins import Catalog

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SCALED = {MXFP8: "kind::mxf8f6f4.block_scale.block32", NVFP4: "kind::mxf4nvf4.block_scale.block16"}
SIZES = {
    "num_experts": 6,
    "top_k": 2,
    "hidden_size": 96,
    "intermediate_size": 64,
    "dtype": "float32",
}

Quantize = Callable[[Tensor], Tensor]


@pytest.mark.parametrize("spec", TORCH_MOE, ids=lambda spec: spec.op)
def test_reference_conforms(spec: KernelSpec) -> None:
    assert check(spec, CPU, num_rows=(0, 5)) > 10


def by_token(
    given: Mapping[str, Tensor], gate_up: Tensor, down: Tensor, first: Quantize, second: Quantize
) -> Tensor:
    """Compute experts token by token with dequantized weights; `first` and `second` round activations."""
    x, y = first(given["x"]), torch.zeros(given["x"].shape)
    for token, (ids, weights) in enumerate(
        zip(given["ids"].tolist(), given["weights"].tolist(), strict=True)
    ):
        for expert, weight in zip(ids, weights, strict=True):
            if expert == len(gate_up):  # no expert
                continue
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            hidden = second((gate / (1 + torch.exp(-gate)) * up).unsqueeze(0))
            y[token] += weight * (down[expert] @ hidden[0])
    return y


def widened(given: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return gate_up and down dequantized to float32."""
    gate_up, down = (
        nvfp4_values(given[name], given[f"{name}_scale"]) * given[f"{name}_factor"].view(-1, 1, 1)
        if f"{name}_factor" in given
        else mxfp8_values(given[name], given[f"{name}_scale"])
        for name in ("gate_up", "down")
    )
    return gate_up, down


def test_mxfp8_reference_matches_dequantized_experts() -> None:
    given = make_inputs(contract_of(TORCH_MOE[0]), SIZES, 9, CPU, strided=True)

    def rounded(x: Tensor) -> Tensor:
        return mxfp8_values(*mxfp8_rows(x))

    found = TORCH_MOE[0].factory()(SIZES)(*given.values())
    torch.testing.assert_close(
        found, by_token(given, *widened(given), rounded, rounded), rtol=1e-4, atol=1e-4
    )


def test_nvfp4_reference_matches_dequantized_experts() -> None:
    given = make_inputs(contract_of(TORCH_MOE[1]), SIZES, 9, CPU, strided=True)

    def rounded(tensor_scale: Tensor) -> Quantize:
        return lambda x: nvfp4_values(*nvfp4_rows(x, tensor_scale)) * tensor_scale

    expected = by_token(
        given, *widened(given), rounded(given["x_scale"]), rounded(given["hidden_scale"])
    )
    found = TORCH_MOE[1].factory()(SIZES)(*given.values())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("spec", "most"), [(TORCH_MOE[0], 0.06), (TORCH_MOE[1], 0.25)], ids=["mxfp8", "nvfp4"]
)
def test_activation_rounding_error_is_bounded(spec: KernelSpec, most: float) -> None:
    given = make_inputs(contract_of(spec), SIZES, 64, CPU, strided=False)
    exact = by_token(given, *widened(given), torch.Tensor.float, torch.Tensor.float)
    difference = spec.factory()(SIZES)(*given.values()) - exact
    assert 0 < difference.square().mean().sqrt() < most * exact.square().mean().sqrt()


def signature(kernel: Any, form: Format) -> dict[str, str]:
    """Return the argument types of a kernel for a format."""
    value, scale = ("fp8e4nv", "u8") if form is MXFP8 else ("u8", "fp8e4nv")
    first = "x" if kernel is gate_up else "hidden"
    return {
        f"{first}_ptr": f"*{value}",
        f"{first}_scale_ptr": f"*{scale}",
        "w_ptr": f"*{value}",
        "w_scale_ptr": f"*{scale}",
        f"{first}_factor_ptr": "*fp32",
        "w_factor_ptr": "*fp32",
        **({"hidden_ptr": "*fp32"} if kernel is gate_up else {"scaled_ptr": "*bf16"}),
        "pairs_ptr": "*i64",
        "ends_ptr": "*i32",
        **({} if kernel is gate_up else {"weights_ptr": "*fp32"}),
    }


@pytest.mark.parametrize("capability", [100, pytest.param(103, marks=pytest.mark.release)])
@pytest.mark.parametrize(
    "tiling",
    [
        pytest.param(each, marks=() if each in (TILINGS[0], TILINGS[-1]) else pytest.mark.release)
        for each in TILINGS
    ],
    ids=lambda tiling: f"{tiling.block_t} pairs",
)
@pytest.mark.parametrize("form", [MXFP8, NVFP4], ids=lambda form: form.name)
@pytest.mark.parametrize("kernel", [gate_up, down], ids=["gate_up", "down"])
def test_experts_use_block_scaled_tensor_cores(
    kernel: Any, form: Format, tiling: Tiling, capability: int, tmp_path: Path
) -> None:
    types = signature(kernel, form)
    constants = {
        "E": 128,
        "BLOCK_E": 128,
        "N": 2048,
        "K": 2048,
        "FORMAT": form.name,
        "PACKED": form.packed,
        "GROUP": form.group,
        "HAS_FACTORS": form is NVFP4,
        "BLOCK_N": BLOCK_N,
        "BLOCK_T": tiling.block_t,
        "BLOCK_K": BLOCK_K,
        **({"TOP_K": 8} if kernel is gate_up else {}),
    }
    code = compiled(
        kernel,
        types,
        constants,
        tmp_path,
        capability=capability,
        aligned=tuple(types),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    assert code.count(f"tcgen05.mma.cta_group::1.{SCALED[form]}") > 0
    assert code.count("mma.sync") == 0
    assert code.stack_bytes == 0, "registers are spilled"
    assert code.num_registers * 32 * tiling.num_warps <= REGISTERS
    assert code.shared_bytes <= SHARED_BYTES
    assert code.tensor_columns <= TENSOR_COLUMNS


@pytest.mark.parametrize("op", [spec.op for spec in MOE])
def test_experts_kernel_is_selected_on_blackwell_only(
    op: str,
) -> None:
    catalog = Catalog.discover()
    problem = {
        "num_experts": 128,
        "top_k": 8,
        "hidden_size": 2048,
        "intermediate_size": 768,
        "dtype": "bfloat16",
    }
    for capability, backend in (((10, 0), "blackwell"), ((9, 0), "torch-blocks")):
        chosen = Selector(
            installed_kernels(catalog), PlatformInfo("cuda", capability), ops=installed_ops(catalog)
        )
        assert chosen.select(op, problem).spec.backend == backend
    assert "compute capability 9.0 is not supported" in explain(chosen.plan(), op)


@pytest.mark.parametrize("op", [spec.op for spec in MOE])
def test_experts_with_odd_sizes_use_the_reference(
    op: str,
) -> None:
    catalog = Catalog.discover()
    problem = {
        "num_experts": 32,
        "top_k": 4,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "dtype": "bfloat16",
    }
    chosen = Selector(
        installed_kernels(catalog), PlatformInfo("cuda", (10, 0)), ops=installed_ops(catalog)
    )
    assert chosen.select(op, problem).spec.backend == "torch-blocks"
    assert "hidden_size 2880 is not a multiple of 128" in explain(chosen.plan(), op)
