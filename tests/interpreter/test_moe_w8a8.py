"""FP8 and INT8 experts under Triton's interpreter. It rounds to e4m3 wrongly, so the reference quantizes rows here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenspeed_testing.conformance import agrees_with_reference, check
from tokenspeed_testing.shapes import contract_of

from tokenspeed_core.api import AxisLimit, KernelSpec
from tokenspeed_kernels import descriptors, integer_inputs
from tokenspeed_kernels.reference import fp8, fp8_block, moe_w8a8
from tokenspeed_kernels.triton.moe import experts_w8a8
from tokenspeed_kernels.triton.moe.tilings import Gemm, Tiling
from tokenspeed_kernels.triton.moe.tuned import tuned_tilings

pytestmark = [
    pytest.mark.interpreter,
    # The interpreter's NumPy warns about values that are masked later.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
SPECS = {spec.op: spec for spec in descriptors.TRITON_MOE}
SPEC, BLOCK_SPEC = SPECS["moe_experts_fp8"], SPECS["moe_experts_fp8_block"]
OTHERS = [
    SPECS[op] for op in ("moe_experts_fp8_static", "moe_experts_int8", "moe_experts_int8_static")
]
INT8_SPEC = SPECS["moe_experts_int8"]
# Most pairs of five experts in each tiling.
PAIRS = sorted(
    {
        int(bound * 5)
        for op in ("moe_experts_fp8", "moe_experts_fp8_block")
        for bound, _ in tuned_tilings(op, Tiling.of)[:-1]
    }
)
SHAPE = {"num_experts": 5, "top_k": 2}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _rounds_rightly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_w8a8, "quantize_fp8", fp8.quantize_fp8)
    monkeypatch.setattr(experts_w8a8, "quantize_fp8_groups", fp8_block.quantize_fp8_groups)
    monkeypatch.setattr(experts_w8a8, "quantize_fp8_static", fp8.quantize_fp8_static)


@pytest.mark.parametrize(
    ("spec", "size", "inner"),
    [(SPEC, 48, 80), (BLOCK_SPEC, 144, 128)],
    ids=lambda each: getattr(each, "op", ""),
)
def test_experts_conform(spec: KernelSpec, size: int, inner: int) -> None:
    case = {**SHAPE, "hidden_size": size, "intermediate_size": inner, "dtype": "float16"}
    assert check(spec, CPU, cases=[case], num_rows=(0, 9)) == 4


@pytest.mark.parametrize("spec", OTHERS, ids=lambda spec: spec.op)
def test_static_and_int8_experts_match_the_reference(spec: KernelSpec) -> None:
    problem = {"num_experts": 3, "top_k": 2, "hidden_size": 48, "intermediate_size": 80}
    problem["dtype"] = "float16"
    seed = torch.Generator().manual_seed(1)
    given = getattr(integer_inputs, spec.op)(problem, 4, CPU, seed, strided=True)
    expected = getattr(moe_w8a8, spec.op)(problem)(*given.values())
    found = getattr(experts_w8a8, spec.op)(problem)(*given.values())
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=0.02)


@pytest.mark.release
@pytest.mark.parametrize("spec", [SPEC, BLOCK_SPEC, *OTHERS], ids=lambda spec: spec.op)
def test_experts_conform_at_every_declared_size(spec: KernelSpec) -> None:
    spec = replace(spec, capability=replace(spec.capability, dtypes=("float16",)))
    assert check(spec, CPU, num_rows=(0, 1, 9)) == 12


@pytest.mark.parametrize(
    "num_pairs",
    [
        *(pytest.param(num_pairs, marks=pytest.mark.release) for num_pairs in PAIRS),
        PAIRS[-1] + 2,
    ],
)
@pytest.mark.parametrize(
    ("spec", "inner"),
    [
        pytest.param(SPEC, 80, marks=pytest.mark.release),
        (BLOCK_SPEC, 128),
        pytest.param(INT8_SPEC, 80, marks=pytest.mark.release),
    ],
    ids=lambda each: getattr(each, "op", ""),
)
def test_every_tiling_matches_the_reference(spec: KernelSpec, inner: int, num_pairs: int) -> None:
    case = {**SHAPE, "hidden_size": 144, "intermediate_size": inner, "dtype": "float32"}
    kernel, num_rows = spec.factory()(case), num_pairs // 2
    agrees_with_reference(kernel, contract_of(spec), case, num_rows, CPU, strided=True)


@pytest.mark.parametrize("block_m", [16, pytest.param(128, marks=pytest.mark.release)])
@pytest.mark.parametrize(
    "order",
    [{"weights_first": True}, {"together": 3}, {"joined": True, "together": 8}],
    ids=["weights first", "pairs first", "joined"],
)
@pytest.mark.parametrize(
    ("spec", "inner"),
    [(SPEC, 80), (BLOCK_SPEC, 128), pytest.param(INT8_SPEC, 80, marks=pytest.mark.release)],
    ids=lambda each: getattr(each, "op", ""),
)
def test_every_order_of_operands_matches_the_reference(
    monkeypatch: pytest.MonkeyPatch,
    spec: KernelSpec,
    inner: int,
    order: dict[str, Any],
    block_m: int,
) -> None:
    gemm = Gemm(32, 128, 4, 3, **order)
    tilings = ((float("inf"), Tiling(block_m, gemm, gemm)),)
    monkeypatch.setattr(experts_w8a8, "tuned_tilings", lambda *_: tilings)
    case = {**SHAPE, "hidden_size": 144, "intermediate_size": inner, "dtype": "float32"}
    agrees_with_reference(spec.factory()(case), contract_of(spec), case, 11, CPU, strided=True)


@pytest.mark.parametrize(
    ("spec", "size", "axes"),
    [
        (SPEC, 40, ["hidden_size", "intermediate_size"]),
        (BLOCK_SPEC, 192, ["intermediate_size"]),
    ],
    ids=lambda each: getattr(each, "op", ""),
)
def test_unaligned_features_are_rejected(spec: KernelSpec, size: int, axes: list[str]) -> None:
    refused = [
        limit.axis
        for limit in spec.capability.limits
        if isinstance(limit, AxisLimit) and limit.refusal(size)
    ]
    assert refused == axes
