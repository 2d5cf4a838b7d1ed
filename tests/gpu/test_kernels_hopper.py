"""FlashAttention-3 with its library on a Hopper device: every declared problem, prompts in graphs, auto's choice."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from tokenspeed_kernels_hopper import FA3

from tokenspeed_core import LLM
from tokenspeed_core.testing.attention import check_attention

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_HOPPER, reason="needs a device of compute capability 9.0"),
    pytest.mark.skipif(
        importlib.util.find_spec("flash_attn_interface") is None, reason=f"needs its library: {FA3.obtain}"
    ),
]


def test_the_backend_conforms_on_the_device() -> None:
    assert check_attention(FA3, torch.device("cuda")) > 50


def test_auto_takes_it_for_prompts_and_the_portable_kernel_for_decodes() -> None:
    with LLM(device="cuda", gpu_memory_utilization=0.3, max_cudagraph_capture_size=2) as llm:
        taken = {dict(op.problem)["phase"]: op.backend for op in llm.kernel_plan.find("attention")}
    assert taken == {"prefill": "fa3", "decode": "triton"}
