"""Collectives of GPUs, and a model on two GPUs with captured steps."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenspeed_comm_deepep import DEEPEP
from tokenspeed_testing.cases import NotRun
from tokenspeed_testing.comm import CommConformance

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.api import KernelSpec
from tokenspeed_kernels.collectives import NCCL_COMM, SYMM_COMM, TRITON_COMM

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))  # for tiny_families

from tiny_families import save_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.parametrize(
    "spec",
    [*NCCL_COMM, SYMM_COMM, *TRITON_COMM, DEEPEP],
    ids=lambda spec: f"{spec.op}-{spec.backend}",
)
def test_kernels_conform(spec: KernelSpec) -> None:
    suite: CommConformance = type("Suite", (CommConformance,), {"spec": spec})()
    try:
        suite.test_two_processes_compute_the_contract()
    except NotRun as reason:
        pytest.skip(str(reason))


def greedy_tokens(
    model: str, lengths: tuple[int, ...] = (5, 40, 130), **settings: Any
) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=24)
    prompts = [{"prompt_token_ids": list(range(3, 3 + length))} for length in lengths]
    with LLM(model, dtype="float32", max_total_tokens=2048, **settings) as llm:
        answers = llm.generate(prompts, params)
    return [list(answer.outputs[0].token_ids) for answer in answers]


tokens_of_one_gpu = cache(greedy_tokens)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("demo", {}),
        ("demo-deepseek", {}),
        ("demo-deepseek", {"enable_expert_parallel": True}),
        ("demo", {"kernel_backend": {"all_reduce": ("symm",)}}),
        ("demo", {"enable_allreduce_fusion": False}),
        ("demo-deepseek", {"enable_allreduce_fusion": False}),
        (
            "demo-deepseek",
            {"enable_expert_parallel": True, "enable_eplb": True, "eplb_interval": 4},
        ),
    ],
)
def test_two_gpus_give_the_tokens_of_one(model: str, settings: dict[str, Any]) -> None:
    found = greedy_tokens(model, tensor_parallel_size=2, **settings)
    assert found == tokens_of_one_gpu(model)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Qwen3Moe", {}),
        ("Gemma3", {}),
        ("GptOss", {}),
        ("GptOss", {"enable_expert_parallel": True}),
        ("MiniMaxM2", {"enable_expert_parallel": True}),
    ],
)
def test_families_on_two_gpus_give_the_tokens_of_one(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    changes = {"num_local_experts": 8} if family == "GptOss" else {}
    save_reference(family, tmp_path, **changes)
    shared: dict[str, Any] = {"lengths": (5, 40, 90), "skip_tokenizer_init": True}
    one = greedy_tokens(str(tmp_path), **shared)
    two = greedy_tokens(str(tmp_path), **shared, tensor_parallel_size=2, **settings)
    assert two == one


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize(
    ("model", "settings"),
    [("demo", {}), ("demo-deepseek", {"enable_expert_parallel": True})],
)
def test_four_gpus_give_the_tokens_of_one(
    model: str, settings: dict[str, Any], is_fused: bool
) -> None:
    settings = {**settings, "enable_allreduce_fusion": is_fused}
    found = greedy_tokens(model, tensor_parallel_size=4, **settings)
    assert found == tokens_of_one_gpu(model)


def batch_texts(folder: Path, num_prompts: int, *flags: str) -> list[str]:
    """Return the greedy answers of `run-batch` with one or several engines."""
    body = {"model": "demo-deepseek", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    lines = (
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {**body, "prompt": list(range(3, 8 + 17 * number % 130))},
        }
        for number in range(num_prompts)
    )
    requests, answers = folder / "requests", folder / "answers"
    requests.write_text("\n".join(map(json.dumps, lines)))
    command = (sys.executable, "-P", "-m", "tokenspeed_core.cli", "run-batch", requests, answers)
    settings = ("--dtype", "float32", "--max-total-tokens", "8192", "--max-num-seqs", "32")
    subprocess.run([*command, "demo-deepseek", *settings, *flags], check=True, timeout=300)
    found = map(json.loads, answers.read_text().splitlines())
    return [each["response"]["body"]["choices"][0]["text"] for each in found]


@pytest.fixture(scope="module")
def texts_of_one_engine(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return batch_texts(tmp_path_factory.mktemp("one"), 40)


KILLED = """
import threading, psutil
from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.errors import EngineDeadError
if __name__ == "__main__":
    llm = LLM(tensor_parallel_size=2, max_total_tokens=65536)
    children = psutil.Process().children(recursive=True)
    rank = next(each for each in children if "tokenspeed_core.worker.process" in each.cmdline())
    threading.Timer(0.5, rank.kill).start()
    try:
        llm.generate(["a"] * 2000, SamplingParams(max_tokens=1000, ignore_eos=True))
    except EngineDeadError as error:
        print(error)
    llm.shutdown()
"""


@pytest.mark.parametrize("is_fused", [True, False])
def test_dead_rank_ends_a_program(is_fused: bool, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(KILLED.replace("max_total", f"enable_allreduce_fusion={is_fused}, max_total"))
    done = subprocess.run(
        [sys.executable, script], check=True, timeout=120, capture_output=True, text=True
    )
    assert "rank 1 of 2 was killed by SIGKILL" in done.stdout


PROGRAM = """
import time
from tokenspeed_core import LLM
if __name__ == "__main__":
    llm = LLM(tensor_parallel_size=2, max_total_tokens=2048)
    llm.generate(["1 + 1"])
    time.sleep(5)
    llm.shutdown()
"""


def test_idle_program_exits(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    subprocess.run([sys.executable, script], check=True, timeout=180)


BALANCED = ("--enable-eplb", "--eplb-interval", "8", "--num-redundant-experts", "2")


@pytest.mark.parametrize("num_prompts", [1, 40], ids=["idle", "busy"])
@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--enforce-eager",),
        BALANCED,
        ("--enforce-eager", "--all2all-backend", "alltoall"),
        ("--enforce-eager", "--all2all-backend", "alltoall", *BALANCED),
    ],
    ids=["graphs", "eager", "balanced", "routed", "routed-balanced"],
)
def test_two_engines_that_share_experts_give_the_tokens_of_one(
    tmp_path: Path, texts_of_one_engine: list[str], num_prompts: int, more: tuple[str, ...]
) -> None:
    shared = ("--data-parallel-size", "2", "--enable-expert-parallel", *more)
    found = batch_texts(tmp_path, num_prompts, *shared)
    assert found == texts_of_one_engine[:num_prompts]


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
@pytest.mark.parametrize("num_prompts", [1, 40], ids=["idle", "busy"])
@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--no-enable-allreduce-fusion",),
        ("--enforce-eager",),
        (*BALANCED[:-1], "4"),
        ("--enforce-eager", "--all2all-backend", "alltoall"),
    ],
    ids=["graphs", "unfused", "eager", "balanced", "routed"],
)
def test_two_engines_of_two_gpus_give_the_tokens_of_one(
    tmp_path: Path, texts_of_one_engine: list[str], num_prompts: int, more: tuple[str, ...]
) -> None:
    shared = ("--data-parallel-size", "2", "--tp", "2", "--enable-expert-parallel", *more)
    found = batch_texts(tmp_path, num_prompts, *shared)
    assert found == texts_of_one_engine[:num_prompts]


@pytest.mark.parametrize(
    ("quantization", "layout"),
    [
        (None, {"tensor_parallel_size": 2}),
        ("fp8", {"tensor_parallel_size": 2}),
        ("fp8-block", {"dense_tp_size": 2}),
    ],
)
def test_fused_all_reduces_change_only_close_tokens(
    quantization: str | None, layout: dict[str, int]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=5)
    # Small steps, then a step with an odd number of tokens, whose transfers overlap with computation.
    batches = [
        [{"prompt_token_ids": [3 + token % 1500 for token in range(length)]} for length in lengths]
        for lengths in ((5, 40, 130), (3250, 3251))
    ]
    answers = []
    for is_fused in (False, True):
        settings: dict[str, Any] = {"enable_allreduce_fusion": is_fused, "max_total_tokens": 8192}
        with LLM("demo", quantization=quantization, **layout, **settings) as llm:
            answers.append(
                [each.outputs[0] for prompts in batches for each in llm.generate(prompts, params)]
            )
    for separate, fused in zip(*answers, strict=True):
        pairs = zip(separate.token_ids, fused.token_ids, strict=False)
        at = next((index for index, (one, other) in enumerate(pairs) if one != other), None)
        if at is not None:
            assert separate.logprobs is not None
            assert fused.logprobs is not None
            assert separate.token_ids[at] in fused.logprobs[at]
            assert fused.token_ids[at] in separate.logprobs[at]
