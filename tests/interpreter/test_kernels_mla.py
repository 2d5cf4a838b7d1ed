"""The Triton kernels of latent attention under Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenspeed_testing.conformance import agrees_with_reference
from tokenspeed_testing.shapes import contract_of

from tokenspeed_kernels import descriptors
from tokenspeed_kernels.triton.mla import absorbed
from tokenspeed_kernels.triton.mla.absorbed import Tiling
from tokenspeed_kernels.triton.mla.prefill import MlaPrefill

pytestmark = [
    pytest.mark.interpreter,
    # The interpreter's NumPy warns about log2(0).
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

CPU = torch.device("cpu")
SPECS = {
    spec.op: spec
    for spec in (
        *descriptors.TRITON_CACHE,
        *descriptors.TRITON_LINEAR,
        *descriptors.TRITON_ATTENTION,
    )
    if spec.op.startswith("mla_")
}
SMALL: dict[str, Any] = {
    "num_heads": 5,
    "latent_size": 40,
    "rope_size": 8,
    "nope_size": 20,
    "value_size": 12,
    "block_size": 8,
}


def agree(op: str, kernel: Any, num_rows: int, dtype: str, kv_dtype: str) -> None:
    contract = contract_of(SPECS[op])
    axes = {**SMALL, "phase": "prefill" if op == "mla_prefill" else "decode"}
    problem = contract.cut({**axes, "dtype": dtype, "kv_dtype": kv_dtype})
    kernel = kernel or SPECS[op].factory()(problem)
    agrees_with_reference(kernel, contract, problem, num_rows, CPU, strided=True)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_entries_are_written(dtype: str) -> None:
    for num_rows in (0, 6, 7):
        agree("mla_write", None, num_rows, dtype, dtype)


@pytest.mark.parametrize("op", ["mla_absorb", "mla_project"])
def test_heads_are_multiplied(op: str) -> None:
    for num_rows in (0, 17, 66):
        agree(op, None, num_rows, "float16", "float16")


@pytest.mark.parametrize(("min_share", "dtype"), [(128, "float16"), (32, "float32")])
def test_decode_conforms(min_share: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absorbed, "MIN_SHARE", min_share)
    for num_rows in (0, 1, 8, 9):  # 9 rows share entries
        agree("mla_decode", None, num_rows, dtype, dtype)


@pytest.mark.parametrize("max_small_step", [512, 0], ids=["absorbed", "expanded"])
@pytest.mark.parametrize("num_rows", [1, 6, 7], ids=lambda num: f"{num} rows")
def test_prefill_conforms(
    max_small_step: int, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absorbed, "MIN_SHARE", 32)
    problem = {**SMALL, "phase": "prefill", "dtype": "float32", "kv_dtype": "float32"}
    # With 6 rows the host does not know the lengths, so that earlier tokens are absorbed.
    kernel = MlaPrefill(problem, Tiling(16, 16, 4, 1), max_small_step, absorbed_tokens=24)
    agree("mla_prefill", kernel, num_rows, "float32", "float32")
