"""FP8 experts under Triton's interpreter. It rounds to e4m3 wrongly, so the reference quantizes rows here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tokenspeed_testing.conformance import check

from tokenspeed_core.api import AxisLimit, KernelSpec
from tokenspeed_kernels import descriptors
from tokenspeed_kernels.reference import fp8, fp8_block
from tokenspeed_kernels.triton.moe import experts_fp8
from tokenspeed_kernels.triton.moe.experts_fp8 import BLOCK_TILINGS, TILINGS

pytestmark = [
    pytest.mark.interpreter,
    # The interpreter's NumPy warns about values that are masked later.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
SPECS = {spec.op: spec for spec in descriptors.TRITON_MOE if "fp8" in spec.op}
SPEC, BLOCK_SPEC = SPECS["moe_experts_fp8"], SPECS["moe_experts_fp8_block"]
PAIRS = [int(bound * 5) for bound, _ in TILINGS[:-1]]  # most pairs of five experts in each tiling
assert [bound for bound, _ in TILINGS] == [bound for bound, _ in BLOCK_TILINGS]
SHAPE = {"num_experts": 5, "top_k": 2}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _rounds_rightly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_fp8, "quantize_fp8", fp8.quantize_fp8)
    monkeypatch.setattr(experts_fp8, "quantize_fp8_groups", fp8_block.quantize_fp8_groups)


@pytest.mark.parametrize(
    ("spec", "size", "inner"), [(SPEC, 48, 80), (BLOCK_SPEC, 144, 128)], ids=list(SPECS)
)
def test_experts_conform(spec: KernelSpec, size: int, inner: int) -> None:
    case = {**SHAPE, "hidden_size": size, "intermediate_size": inner, "dtype": "float16"}
    assert check(spec, CPU, cases=[case], num_rows=(0, 9)) == 4


@pytest.mark.release
@pytest.mark.parametrize("spec", [SPEC, BLOCK_SPEC], ids=list(SPECS))
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
@pytest.mark.parametrize(("spec", "inner"), [(SPEC, 80), (BLOCK_SPEC, 128)], ids=list(SPECS))
def test_every_tiling_matches_the_reference(spec: KernelSpec, inner: int, num_pairs: int) -> None:
    case = {**SHAPE, "hidden_size": 144, "intermediate_size": inner, "dtype": "float32"}
    assert check(spec, CPU, cases=[case], num_rows=(num_pairs // 2,)) == 2


@pytest.mark.parametrize(
    ("spec", "size", "axes"),
    [
        (SPEC, 40, ["hidden_size", "intermediate_size"]),
        (BLOCK_SPEC, 192, ["intermediate_size"]),
    ],
    ids=list(SPECS),
)
def test_unaligned_features_are_rejected(spec: KernelSpec, size: int, axes: list[str]) -> None:
    refused = [
        limit.axis
        for limit in spec.capability.limits
        if isinstance(limit, AxisLimit) and limit.refusal(size)
    ]
    assert refused == axes
