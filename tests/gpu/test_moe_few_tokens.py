"""Experts for few tokens on a device, at model sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenspeed_testing.conformance import check

from tokenspeed_kernels import descriptors, inputs
from tokenspeed_kernels.reference import moe
from tokenspeed_kernels.triton.moe.experts import moe_experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
(SPEC,) = (spec for spec in descriptors.TRITON_MOE if spec.op == "moe_experts")
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
def test_few_tokens_conform(dtype: str) -> None:
    case = {
        "num_experts": 48,
        "top_k": 3,
        "hidden_size": 200,
        "intermediate_size": 120,
        "dtype": dtype,
    }
    assert check(SPEC, CUDA, cases=[case], num_rows=(1, 4, 5)) == 6


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 5])
@pytest.mark.parametrize("model", SIZES)
def test_only_chosen_experts_are_read(model: str, num_tokens: int) -> None:
    problem = SIZES[model]
    generator = torch.Generator().manual_seed(1)
    given = inputs.moe_experts(problem, num_tokens, CUDA, generator, strided=False)
    wide = {**problem, "dtype": "float32"}
    floats = {name: value.float() for name, value in given.items() if name != "ids"}
    expected = moe.moe_experts(wide)(**floats, ids=given["ids"])
    idle = torch.ones(problem["num_experts"] + 1, dtype=torch.bool)
    idle[given["ids"].long().cpu()] = False  # the last id means no expert
    idle = idle[:-1]
    for name in ("gate_up", "down"):
        given[name][idle.to(CUDA)] = float("nan")
    found = moe_experts(problem)(*given.values())
    error = float((found - expected).norm() / expected.norm())
    print(f"{model}, {num_tokens} tokens: relative error {error:.2e}")
    assert error < 1e-2
