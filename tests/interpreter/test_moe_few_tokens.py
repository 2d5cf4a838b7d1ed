"""Experts for few tokens, and which experts' weights are read, under Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenspeed_testing.conformance import check

from tokenspeed_kernels import descriptors, inputs
from tokenspeed_kernels.reference import moe
from tokenspeed_kernels.triton.moe.experts import moe_experts
from tokenspeed_kernels.triton.moe.few_tokens import FewTokens

pytestmark = [
    pytest.mark.interpreter,
    # The interpreter's NumPy warns about values that are masked later.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
(SPEC,) = (spec for spec in descriptors.TRITON_MOE if spec.op == "moe_experts")
CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "num_experts": 48,
    "top_k": 3,
    "hidden_size": 24,
    "intermediate_size": 12,
}


@pytest.mark.parametrize(("dtype", "num_rows"), [("float32", 1), ("float16", 4)])
def test_few_tokens_conform(dtype: str, num_rows: int) -> None:
    case = {**SHAPE, "dtype": dtype}
    assert FewTokens(case).max_pairs == 12
    spec = replace(SPEC, capability=replace(SPEC.capability, dtypes=(dtype,)))
    assert check(spec, CPU, cases=[case], num_rows=(num_rows,)) == 2


def test_long_rows_are_computed_by_tiles() -> None:
    case = {**SHAPE, "dtype": "bfloat16"}
    assert FewTokens({**case, "hidden_size": 16385}).max_pairs == 0
    assert FewTokens({**case, "top_k": 8, "intermediate_size": 4097}).max_pairs == 0
    assert FewTokens({**case, "num_experts": 4}).max_pairs == 3


@pytest.mark.parametrize("num_tokens", [1, 4, 6])
def test_experts_without_tokens_are_not_read(num_tokens: int) -> None:
    problem = {**SHAPE, "dtype": "float32"}
    generator = torch.Generator().manual_seed(3)
    given = inputs.moe_experts(problem, num_tokens, CPU, generator, strided=False)
    expected = moe.moe_experts(problem)(*given.values())
    idle = torch.ones(48, dtype=torch.bool)
    ids = given["ids"].long()
    idle[ids[ids < 48]] = False
    for name in ("gate_up", "down"):
        given[name][idle] = float("nan")
    found = moe_experts(problem)(*given.values())
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
