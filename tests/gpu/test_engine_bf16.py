"""The engine in bfloat16 on a GPU: transformers agrees wherever the model is sure, and no schedule changes a token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.checkpoint import resolve_checkpoint
from tokenspeed_core.config import Config
from tokenspeed_core.engine.outputs import RequestOutput
from tokenspeed_core.plugins.catalog import Catalog

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_TOKENS = 48
TOP = 5
PROMPTS = [[(seed * 7919 + i * 104729) % 1400 + 40 for i in range(12 + 9 * seed)] for seed in range(12)]


def generate(llm: LLM, **changes: object) -> list[RequestOutput]:
    fields: dict[str, object] = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True} | changes
    return llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], SamplingParams.model_validate(fields))


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return resolve_checkpoint(Config(), Catalog.discover()).path


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cuda", gpu_memory_utilization=0.3) as made:
        yield made


def test_the_first_divergence_from_transformers_is_among_the_best_five_of_both(llm: LLM, checkpoint: Path) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).cuda().eval()
    num_equal = 0
    for output in generate(llm, logprobs=TOP):
        ours, ids = output.outputs[0], output.prompt_token_ids
        with torch.inference_mode():
            logits = reference(torch.tensor([ids + ours.token_ids], device="cuda")).logits[0, len(ids) - 1 : -1]
        theirs = logits.argmax(-1).tolist()
        at = next((i for i, (a, b) in enumerate(zip(ours.token_ids, theirs, strict=True)) if a != b), None)
        if at is None:
            num_equal += 1
            continue
        assert ours.logprobs is not None
        assert ours.token_ids[at] in logits[at].topk(TOP).indices.tolist()
        assert theirs[at] in ours.logprobs[at]
    assert num_equal >= len(PROMPTS) // 2, "most sequences should not diverge at all"


def test_graphs_chunks_and_prefix_hits_change_no_token_of_sure_sequences(llm: LLM) -> None:
    first = [output.outputs[0].token_ids for output in generate(llm)]
    again = generate(llm)
    assert any(output.num_cached_tokens for output in again), "the second run should hit the prefix cache"
    alone = [
        llm.generate([{"prompt_token_ids": ids}], SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True))
        for ids in PROMPTS
    ]
    with LLM(device="cuda", gpu_memory_utilization=0.3, enforce_eager=True, chunked_prefill_size=16) as eager:
        eagerly = [output.outputs[0].token_ids for output in generate(eager)]
    for others in ([o.outputs[0].token_ids for o in again], [o[0].outputs[0].token_ids for o in alone], eagerly):
        same = sum(a == b for a, b in zip(first, others, strict=True))
        assert same >= len(PROMPTS) * 3 // 4, f"only {same} of {len(PROMPTS)} sequences are the same"
