"""FlashAttention-3 with its library on a Hopper device: every declared problem, prompts in graphs, auto's choice."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from tokenspeed_kernels_hopper import FA3

from tokenspeed_core import LLM
from tokenspeed_core.kernels.attention import AttentionProblem
from tokenspeed_core.testing.attention import Rows, attend, check_attention, limits_of, make_scene

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


@pytest.mark.parametrize("window", [None, 20])
def test_a_captured_step_of_prompts_replays_on_other_lengths(window: int | None) -> None:
    device = torch.device("cuda")
    problem = AttentionProblem("prefill", 8, 2, 128, "bfloat16", "bfloat16", 16, 128**-0.5, window)
    first = make_scene(problem, Rows((9, 5, 2), (20, 5, 40)), device, seed=1, max_len=256)
    second = make_scene(problem, Rows((1, 12, 3), (200, 90, 3)), device, seed=2, max_len=256)
    kernel = FA3.factory()(problem, limits_of(first), device)
    attend(kernel, first)
    kernel.prepare(replace(first.step, max_num_query=16, host_query_start=None, host_seq_lens=None))
    out = torch.full_like(first.q, float("nan"), memory_format=torch.contiguous_format)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.forward(first.q, first.k_cache, first.v_cache, out)
    for name in ("query_start", "seq_lens", "block_table"):
        getattr(first.step, name).copy_(getattr(second.step, name))
    first.q.copy_(second.q)
    first.k_cache.copy_(second.k_cache)
    first.v_cache.copy_(second.v_cache)
    graph.replay()
    torch.testing.assert_close(out.float(), second.expected, rtol=3e-2, atol=3e-2)


def test_auto_takes_it_for_prompts_and_the_portable_kernel_for_decodes() -> None:
    with LLM(device="cuda", gpu_memory_utilization=0.3, max_cudagraph_capture_size=2) as llm:
        taken = {dict(op.problem)["phase"]: op.backend for op in llm.kernel_plan.find("attention")}
    assert taken == {"prefill": "fa3", "decode": "triton"}
