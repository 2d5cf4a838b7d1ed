"""DeepGEMM on a Hopper device: all declared problems, and CUDA graphs."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from tokenspeed_kernels_deepgemm import DEEPGEMM, EXPERTS
from tokenspeed_testing.conformance import check

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_HOPPER, reason="needs a device of compute capability 9.0"),
    pytest.mark.skipif(
        importlib.util.find_spec("deep_gemm") is None,
        reason=f"needs its library: {DEEPGEMM.obtain}",
    ),
]


def test_block_gemm_conforms() -> None:
    assert check(DEEPGEMM, torch.device("cuda")) >= 16


def test_experts_conform() -> None:
    assert check(EXPERTS, torch.device("cuda")) >= 8
