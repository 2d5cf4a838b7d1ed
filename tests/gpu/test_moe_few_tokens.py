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
W4 = {"moe_experts_w4a16": 1e-2, "moe_experts_mxfp4": 1e-2, "moe_biased_experts_mxfp4": 2e-2}
QWEN3: dict[str, Any] = {
    "num_experts": 128,
    "top_k": 8,
    "hidden_size": 2048,
    "intermediate_size": 768,
    "group_size": 128,
    "alpha": 1.702,
    "limit": 7.0,
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
GPT_OSS = {**QWEN3, "num_experts": 32, "top_k": 4, "hidden_size": 2880, "intermediate_size": 2880}


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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("op", W4)
@pytest.mark.parametrize("group_size", [32, 0])
def test_few_tokens_conform_in_four_bits(op: str, dtype: str, group_size: int) -> None:
    case = {
        **QWEN3,
        "num_experts": 48,
        "top_k": 3,
        "hidden_size": 224,
        "intermediate_size": 96,
        "group_size": group_size,
        "dtype": dtype,
    }
    # Some numbers of rows have zero points or an order of columns.
    assert check(SPECS[op], CUDA, cases=[case], num_rows=(1, 2, 3, 4, 5)) == 10


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 5])
@pytest.mark.parametrize(
    ("op", "problem"),
    [
        *(
            pytest.param(op, problem, id=f"{op}, {model}")
            for op in (*OPS, "moe_experts_w4a16", "moe_experts_mxfp4")
            for model, problem in SIZES.items()
        ),
        pytest.param("moe_biased_experts_mxfp4", GPT_OSS, id="gpt-oss-20b"),
        pytest.param("moe_biased_experts_mxfp4", GPT_OSS | {"num_experts": 128}, id="gpt-oss-120b"),
    ],
)
def test_only_chosen_experts_are_read(op: str, problem: dict[str, Any], num_tokens: int) -> None:
    contract = contract_of(SPECS[op])
    given = make_inputs(contract, problem, num_tokens, CUDA, strided=False, seed=1)
    (expected,) = reference(contract, problem, given)
    used = {*given["ids"].flatten().tolist()}
    for name in given.keys() - {*contract.rows}:
        if given[name] is None:
            continue
        # 255 is the largest E8M0 scale.
        spoiled = 255 if given[name].dtype == torch.uint8 else float("nan")
        for expert in {*range(problem["num_experts"])} - used:
            given[name][expert] = spoiled
    found = SPECS[op].factory()(problem)(*given.values()).float()
    error = float((found - expected).norm() / expected.norm())
    print(f"{op}, {num_tokens} tokens: relative error {error:.2e}")
    assert error < {**OPS, **W4}[op]
