"""The Blackwell plugin on a Blackwell device: all declared problems, CUDA graphs, and selection."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from tokenspeed_kernels_blackwell import (
    BLOCK_SCALED,
    FA4,
    FLASHINFER,
    FLASHINFER_MLA,
    MLA,
    MOE,
    PREFILL,
)
from tokenspeed_testing.attention import check_attention
from tokenspeed_testing.conformance import check

from tokenspeed_core import LLM
from tokenspeed_core.api.kernels import KernelSpec

IS_BLACKWELL = torch.cuda.is_available() and torch.cuda.get_device_capability() in (
    (10, 0),
    (10, 3),
)
HAS_LIBRARY = importlib.util.find_spec("flashinfer") is not None
HAS_FA4 = all(importlib.util.find_spec(name) for name in FA4.requires)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not IS_BLACKWELL, reason="needs a device of compute capability 10.0 or 10.3"
    ),
]
NEEDS_LIBRARY = pytest.mark.skipif(
    not HAS_LIBRARY, reason=f"needs its library: {FLASHINFER.obtain}"
)
NEEDS_FA4 = pytest.mark.skipif(not HAS_FA4, reason=f"needs its library: {FA4.obtain}")
BACKENDS = [
    PREFILL,
    pytest.param(FLASHINFER, marks=NEEDS_LIBRARY),
    pytest.param(FA4, marks=NEEDS_FA4),
]


@pytest.mark.parametrize("spec", BACKENDS, ids=lambda spec: spec.backend)
def test_attention_conforms(spec: KernelSpec) -> None:
    assert check_attention(spec, torch.device("cuda")) >= 20


@pytest.mark.parametrize("spec", [*BLOCK_SCALED, *MOE], ids=lambda spec: spec.op)
def test_block_scaled_ops_conform(spec: KernelSpec) -> None:
    assert check(spec, torch.device("cuda"), num_rows=(0, 1, 17, 64, 131)) >= 20


@pytest.mark.parametrize(
    "spec", [MLA, *(pytest.param(spec, marks=NEEDS_LIBRARY) for spec in FLASHINFER_MLA)]
)
def test_mla_decode_conforms(spec: KernelSpec) -> None:
    assert check(spec, torch.device("cuda")) >= 8


def test_auto_uses_blackwell_for_prefill_only() -> None:
    with LLM(device="cuda", gpu_memory_utilization=0.3, max_cudagraph_capture_size=2) as llm:
        taken = {dict(op.problem)["phase"]: op.backend for op in llm.kernel_plan.find("attention")}
        assert llm.generate(["what is 23 + 45?"])[0].outputs[0].token_ids
    assert taken == {"prefill": "blackwell", "decode": "triton"}
