"""Experts with 4-bit weights for few tokens, under Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenspeed_testing.conformance import make_inputs, reference
from tokenspeed_testing.shapes import contract_of
from torch import Tensor

from tokenspeed_kernels import descriptors
from tokenspeed_kernels.triton.moe import biased_experts, experts_w4a16
from tokenspeed_kernels.triton.moe.few_tokens_w4 import FewTokensW4

pytestmark = [
    pytest.mark.interpreter,
    # The interpreter's NumPy warns about values that are masked later.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
SPECS = {spec.op: spec for spec in descriptors.TRITON_MOE}
W4A16, MXFP4, BIASED = "moe_experts_w4a16", "moe_experts_mxfp4", "moe_biased_experts_mxfp4"
CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "num_experts": 96,
    "top_k": 3,
    "hidden_size": 96,
    "intermediate_size": 32,
    "alpha": 1.7,
    "limit": 7.0,
    "dtype": "float16",
}


@pytest.fixture(autouse=True)
def _never_sorts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the kernels for many tokens fail."""
    monkeypatch.setattr(experts_w4a16, "sort_by_expert", None)
    monkeypatch.setattr(biased_experts, "sort_by_expert", None)


def inputs(op: str, problem: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    return make_inputs(contract_of(SPECS[op]), problem, num_tokens, CPU, strided=True)


def error(op: str, problem: dict[str, Any], given: dict[str, Tensor]) -> float:
    """Run an op and return its relative error."""
    (expected,) = reference(contract_of(SPECS[op]), problem, given)
    found = SPECS[op].factory()(problem)(*given.values()).float()
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("op", "changed", "num_tokens"),
    [
        (W4A16, {"group_size": 32}, 1),
        (W4A16, {"group_size": 32, "dtype": "bfloat16", "top_k": 2}, 2),  # with zero points
        (W4A16, {"group_size": 0, "top_k": 2}, 3),  # with an order of columns
        (W4A16, {"group_size": 64, "hidden_size": 64, "intermediate_size": 192}, 1),
        (MXFP4, {"intermediate_size": 96}, 1),
        (MXFP4, {"dtype": "bfloat16", "top_k": 1}, 4),
        (BIASED, {"intermediate_size": 96}, 1),
        (BIASED, {"dtype": "float32", "limit": 1.0}, 4),
    ],
)
def test_few_tokens_match_the_reference(op: str, changed: dict[str, Any], num_tokens: int) -> None:
    problem = {**SHAPE, **changed}
    given = inputs(op, problem, num_tokens)
    # The interpreter truncates to bfloat16.
    bound = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 2e-2}[problem["dtype"]]
    assert error(op, problem, given) < bound


@pytest.mark.parametrize("op", [W4A16, MXFP4, BIASED])
def test_tokens_share_experts(op: str) -> None:
    problem = {**SHAPE, "group_size": 32}
    given = inputs(op, problem, 4)
    given["ids"] = torch.tensor([[7, 3, 9], [9, 7, 3], [7, 96, 9], [96, 96, 96]], dtype=torch.int32)
    given["weights"][1] = 0.0
    (expected,) = reference(contract_of(SPECS[op]), problem, given)
    found = SPECS[op].factory()(problem)(*given.values()).float()
    assert not found[[1, 3]].any()
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


def test_large_weights_are_computed_by_tiles() -> None:
    for kind, most in (("int4", 12), ("mxfp4", 24)):
        problem = {**SHAPE, "group_size": 32}
        assert FewTokensW4(problem, kind).max_pairs == most
        assert FewTokensW4({**problem, "num_experts": 4}, kind).max_pairs == 3
        assert FewTokensW4({**problem, "hidden_size": 2880}, kind).max_pairs == most
        assert FewTokensW4({**problem, "hidden_size": 2912}, kind).max_pairs == 0
        assert FewTokensW4({**problem, "top_k": 8, "intermediate_size": 16416}, kind).max_pairs == 0
