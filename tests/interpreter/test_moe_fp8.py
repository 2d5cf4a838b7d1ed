"""FP8 experts under Triton's interpreter. It rounds to e4m3 wrongly, so the reference quantizes rows here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tokenspeed_testing.conformance import check

from tokenspeed_core.api import AxisLimit
from tokenspeed_kernels import descriptors
from tokenspeed_kernels.reference import fp8
from tokenspeed_kernels.triton.moe import experts_fp8
from tokenspeed_kernels.triton.moe.experts_fp8 import TILINGS

pytestmark = [
    pytest.mark.interpreter,
    # The interpreter's NumPy warns about values that are masked later.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
(SPEC,) = (spec for spec in descriptors.TRITON_MOE if spec.op == "moe_experts_fp8")
PAIRS = [int(bound * 5) for bound, _ in TILINGS[:-1]]  # most pairs of five experts in each tiling
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _rounds_rightly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_fp8, "quantize_fp8", fp8.quantize_fp8)


def test_experts_conform() -> None:
    spec = replace(SPEC, capability=replace(SPEC.capability, dtypes=("float16",)))
    assert check(spec, CPU, num_rows=(0, 1, 9)) == 12


@pytest.mark.parametrize(
    "num_pairs",
    [
        *(pytest.param(num_pairs, marks=pytest.mark.release) for num_pairs in PAIRS),
        PAIRS[-1] + 2,
    ],
)
def test_every_tiling_matches_the_reference(num_pairs: int) -> None:
    case = {
        "num_experts": 5,
        "top_k": 2,
        "hidden_size": 144,
        "intermediate_size": 80,
        "dtype": "float32",
    }
    assert check(SPEC, CPU, cases=[case], num_rows=(num_pairs // 2,)) == 2


def test_unaligned_features_are_rejected() -> None:
    refused = [
        limit.axis
        for limit in SPEC.capability.limits
        if isinstance(limit, AxisLimit) and limit.refusal(40)
    ]
    assert refused == ["hidden_size", "intermediate_size"]
