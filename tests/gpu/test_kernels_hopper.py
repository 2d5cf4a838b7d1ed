"""FlashAttention-3 on a Hopper device: all declared problems, CUDA graphs, and selection."""

from __future__ import annotations

import importlib.util
from itertools import accumulate
from typing import Any

import pytest
import torch
from tokenspeed_kernels_hopper import FA3, FA3_SCORES, fa3
from tokenspeed_kernels_hopper.gather import Gathered
from tokenspeed_testing.attention import attention_problems, check_attention

from tokenspeed_core import LLM
from tokenspeed_core.api import AttentionLimits, AttentionProblem, AttentionStep, KernelSpec

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_HOPPER, reason="needs a device of compute capability 9.0"),
    pytest.mark.skipif(
        importlib.util.find_spec("flash_attn_interface") is None,
        reason=f"needs its library: {FA3.obtain}",
    ),
]


@pytest.mark.parametrize("spec", [FA3, FA3_SCORES], ids=["plain", "scores"])
def test_backend_conforms(spec: KernelSpec) -> None:
    assert check_attention(spec, torch.device("cuda")) > 50


def test_gathered_keys_give_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = []

    def fill(self: Gathered, *arguments: Any) -> None:
        gathered.append(self)
        copy(self, *arguments)

    copy = Gathered.fill
    monkeypatch.setattr(Gathered, "fill", fill)
    monkeypatch.setattr(fa3, "MIN_QUERIES", 0)
    monkeypatch.setattr(fa3, "MIN_TOKENS", 0)
    problems = [
        each for each in attention_problems(FA3) if each.phase == "prefill" and each.window is None
    ]
    assert len(problems) > 2
    assert check_attention(FA3, torch.device("cuda"), cases=problems) > 10
    assert len(gathered) > 30


def test_long_prompts_match_paged_attention_bitwise(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = AttentionProblem("prefill", 8, 2, 128, "bfloat16", "bfloat16", 16, 128**-0.5, None)
    device, found = torch.device("cuda"), []
    lengths, counts = (3000, 5003, 1), (3000, 2200, 1)
    table = torch.randperm(520, dtype=torch.int32).to(device)
    rows = torch.nn.utils.rnn.pad_sequence(
        table.split([188, 313, 19]), batch_first=True, padding_value=-1
    )
    starts = (0, *accumulate(counts))
    step = AttentionStep(
        3,
        starts[-1],
        max(counts),
        max(lengths),
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        rows,
        starts,
        lengths,
    )
    assert fa3.gathering_pays(step)
    caches = torch.randn((520, 2, 16, 2, 128), dtype=torch.bfloat16, device=device)
    for row, length in enumerate(lengths):  # stale values beyond the end of each row
        caches[rows[row, length // 16].long(), :, length % 16 :] = float("nan")
    q = torch.randn((starts[-1], 8, 128), dtype=torch.bfloat16, device=device)
    for least in (fa3.MIN_QUERIES, 10**9):
        monkeypatch.setattr(fa3, "MIN_QUERIES", least)
        kernel = fa3.attention(problem, AttentionLimits(4, 8192, 8192, 512), device)
        kernel.prepare(step)
        assert (kernel._gathered is None) == (least == 10**9)
        found.append(torch.full_like(q, float("nan")))
        kernel.forward(q, caches[:, 0], caches[:, 1], found[-1])
    assert not found[0].isnan().any()
    assert torch.equal(*found)


def test_auto_uses_fa3_for_prefill_only() -> None:
    with LLM(device="cuda", gpu_memory_utilization=0.3, max_cudagraph_capture_size=2) as llm:
        taken = {dict(op.problem)["phase"]: op.backend for op in llm.kernel_plan.find("attention")}
    assert taken == {"prefill": "fa3", "decode": "triton"}
