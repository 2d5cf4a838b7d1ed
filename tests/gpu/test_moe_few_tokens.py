"""Experts for few tokens on a device, at model sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenspeed_testing.conformance import check, make_inputs, reference
from tokenspeed_testing.shapes import contract_of

from tokenspeed_kernels import descriptors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
SPECS = {spec.op: spec for spec in descriptors.TRITON_MOE}
HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
# The largest relative error. Rounding to bfloat16 before quantization may change codes.
OPS = {"moe_experts": 1e-2}
if HAS_FP8:
    OPS |= {"moe_experts_fp8": 2e-2, "moe_experts_fp8_block": 2e-2}
QWEN3: dict[str, Any] = {
    "num_experts": 128,
    "top_k": 8,
    "hidden_size": 2048,
    "intermediate_size": 768,
    "dtype": "bfloat16",
}
SIZES = {
    "Qwen3-30B-A3B": QWEN3,
    "DeepSeek-V2-Lite": {**QWEN3, "num_experts": 64, "top_k": 6, "intermediate_size": 1408},
    "Mixtral": {
        **QWEN3,
        "num_experts": 8,
        "top_k": 2,
        "hidden_size": 4096,
        "intermediate_size": 14336,
    },
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("op", OPS)
def test_few_tokens_conform(op: str, dtype: str) -> None:
    case = {
        "num_experts": 48,
        "top_k": 3,
        "hidden_size": 208,
        "intermediate_size": 128,
        "dtype": dtype,
    }
    assert check(SPECS[op], CUDA, cases=[case], num_rows=(1, 2, 4, 5)) == 8


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 5])
@pytest.mark.parametrize("model", SIZES)
@pytest.mark.parametrize("op", OPS)
def test_only_chosen_experts_are_read(op: str, model: str, num_tokens: int) -> None:
    problem, contract = SIZES[model], contract_of(SPECS[op])
    given = make_inputs(contract, problem, num_tokens, CUDA, strided=False, seed=1)
    (expected,) = reference(contract, problem, given)
    used = {*given["ids"].flatten().tolist()}
    for name in given.keys() - {*contract.rows}:
        for expert in {*range(problem["num_experts"])} - used:
            given[name][expert] = float("nan")
    found = SPECS[op].factory()(problem)(*given.values()).float()
    error = float((found - expected).norm() / expected.norm())
    print(f"{op}, {model}, {num_tokens} tokens: relative error {error:.2e}")
    assert error < OPS[op]
