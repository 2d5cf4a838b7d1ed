"""Collectives of GPUs, and a model on two GPUs with captured steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenspeed_testing.comm import CommConformance

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.api import KernelSpec
from tokenspeed_kernels.collectives import NCCL_COMM, SYMM_COMM, TRITON_COMM

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.parametrize(
    "spec", [*NCCL_COMM, SYMM_COMM, *TRITON_COMM], ids=lambda spec: f"{spec.op}-{spec.backend}"
)
def test_kernels_conform(spec: KernelSpec) -> None:
    suite: CommConformance = type("Suite", (CommConformance,), {"spec": spec})()
    suite.test_two_processes_compute_the_contract()


def greedy_tokens(model: str, **settings: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=24)
    prompts = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (5, 40, 130)]
    with LLM(model, dtype="float32", max_total_tokens=2048, **settings) as llm:
        answers = llm.generate(prompts, params)
    return [list(answer.outputs[0].token_ids) for answer in answers]


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("demo", {}),
        ("demo-deepseek", {}),
        ("demo-deepseek", {"enable_expert_parallel": True}),
        ("demo", {"kernel_backend": {"all_reduce": ("symm",)}}),
        ("demo", {"enable_allreduce_fusion": True}),
        ("demo-deepseek", {"enable_allreduce_fusion": True}),
    ],
)
def test_two_gpus_give_the_tokens_of_one(model: str, settings: dict[str, Any]) -> None:
    found = greedy_tokens(model, tensor_parallel_size=2, **settings)
    assert found == greedy_tokens(model)
