"""Experts for few tokens, and which experts' weights are read, under Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenspeed_testing.conformance import (
    agrees_with_reference,
    check,
    make_inputs,
    reference,
)
from tokenspeed_testing.shapes import contract_of

from tokenspeed_core.api import KernelSpec
from tokenspeed_kernels import descriptors
from tokenspeed_kernels.reference import fp8, fp8_block
from tokenspeed_kernels.triton.moe import experts_w8a8
from tokenspeed_kernels.triton.moe.few_tokens import FewTokens

pytestmark = [
    pytest.mark.interpreter,
    # The interpreter's NumPy warns about values that are masked later.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
SPECS = {spec.op: spec for spec in descriptors.TRITON_MOE}
SPEC = SPECS["moe_experts"]
EIGHT_BITS = {
    "moe_experts_fp8": {"hidden_size": 48, "intermediate_size": 80},
    "moe_experts_fp8_block": {"hidden_size": 144, "intermediate_size": 128},
    "moe_experts_fp8_static": {"hidden_size": 48, "intermediate_size": 16},
    "moe_experts_int8": {"hidden_size": 48, "intermediate_size": 16},
}
CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "num_experts": 48,
    "top_k": 3,
    "hidden_size": 24,
    "intermediate_size": 12,
}


@pytest.fixture(autouse=True)
def _rounds_rightly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantize rows with the reference, because the interpreter rounds to e4m3 wrongly."""
    monkeypatch.setattr(experts_w8a8, "quantize_fp8", fp8.quantize_fp8)
    monkeypatch.setattr(experts_w8a8, "quantize_fp8_groups", fp8_block.quantize_fp8_groups)
    monkeypatch.setattr(experts_w8a8, "quantize_fp8_static", fp8.quantize_fp8_static)


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
    assert FewTokens({**case, "top_k": 8, "intermediate_size": 4097}, "channel").max_pairs == 8
    assert FewTokens({**case, "hidden_size": 2048}, "block").max_pairs == 6
    assert FewTokens({**case, "hidden_size": 2049}, "block").max_pairs == 0


@pytest.mark.parametrize("num_rows", [1, pytest.param(2, marks=pytest.mark.release)])
@pytest.mark.parametrize("op", EIGHT_BITS)
def test_few_tokens_conform_in_eight_bits(
    op: str, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts_w8a8, "sort_by_expert", None)  # other kernels must not run
    case = {**SHAPE, **EIGHT_BITS[op], "dtype": "float32"}
    for strided in (False, True):
        agrees_with_reference(
            SPECS[op].factory()(case), contract_of(SPECS[op]), case, num_rows, CPU, strided=strided
        )


@pytest.mark.parametrize(
    ("spec", "num_tokens"),
    [
        (SPEC, 1),
        (SPEC, 4),
        (SPEC, 6),
        (SPECS["moe_experts_fp8"], 2),
        (SPECS["moe_experts_fp8_block"], 2),
    ],
    ids=lambda each: getattr(each, "op", each),
)
def test_experts_without_tokens_are_not_read(spec: KernelSpec, num_tokens: int) -> None:
    problem = {**SHAPE, **EIGHT_BITS.get(spec.op, {}), "dtype": "float32"}
    contract = contract_of(spec)
    given = make_inputs(contract, problem, num_tokens, CPU, strided=False, seed=3)
    (expected,) = reference(contract, problem, given)
    idle = torch.ones(48, dtype=torch.bool)
    ids = given["ids"].long()
    idle[ids[ids < 48]] = False
    for name in given.keys() - {*contract.rows}:
        for expert in idle.nonzero().flatten().tolist():
            given[name][expert] = float("nan")
    found = spec.factory()(problem)(*given.values())
    tolerance = contract.tolerance("float32")
    torch.testing.assert_close(found, expected, rtol=tolerance.relative, atol=tolerance.absolute)
