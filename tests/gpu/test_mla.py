"""Latent attention on a GPU: large steps, which expand their entries, and CUDA graphs of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenspeed_testing.conformance import agrees_with_reference, replays
from tokenspeed_testing.shapes import contract_of

from tokenspeed_kernels import descriptors
from tokenspeed_kernels.triton.mla.prefill import MlaPrefill

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LITE: dict[str, Any] = {
    "num_heads": 16,
    "latent_size": 512,
    "rope_size": 64,
    "nope_size": 128,
    "value_size": 128,
    "block_size": 64,
    "phase": "prefill",
}


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("num_heads", [16, 128])
def test_large_prefills_conform(num_heads: int, kv_dtype: str) -> None:
    spec = next(spec for spec in descriptors.TRITON_ATTENTION if spec.op == "mla_prefill")
    contract, device = contract_of(spec), torch.device("cuda")
    problem = {**LITE, "num_heads": num_heads, "dtype": "bfloat16", "kv_dtype": kv_dtype}
    kernel = MlaPrefill(problem, max_small_step=0, absorbed_tokens=32)
    for num_rows in (1, 6, 7):  # the host knows the lengths of odd numbers of rows
        agrees_with_reference(kernel, contract, problem, num_rows, device, strided=True)
    replays(kernel, contract, problem, 6, device)
