"""The engine in bfloat16 on a GPU, compared with transformers and across batch sizes and schedules."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenspeed_demo.items import REQUIRED, held_out_set
from tokenspeed_demo.render import Renderer

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.checkpoint.resolve import resolve_checkpoint
from tokenspeed_core.config import Config
from tokenspeed_core.engine.outputs import RequestOutput
from tokenspeed_core.plugins.catalog import Catalog

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_TOKENS = 48
TOP = 5
MAX_TOTAL_TOKENS = 65536  # of the KV cache, so that several processes can run tests
PROMPTS = [
    [(seed * 7919 + i * 104729) % 1400 + 40 for i in range(12 + 9 * seed)] for seed in range(12)
]


def generate(
    llm: LLM, prompts: list[list[int]] = PROMPTS, **changes: object
) -> list[RequestOutput]:
    fields: dict[str, object] = {
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
    } | changes
    return llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts], SamplingParams.model_validate(fields)
    )


def chats(checkpoint: Path, num_items: int = 3) -> list[list[int]]:
    """Return held-out prompts of the demo's tasks, for which its predictions are confident."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    renderer = Renderer(checkpoint / "chat_template.jinja")
    items = [item for task in REQUIRED for item in held_out_set(task, num_items)]
    return [tokenizer.encode(renderer.prompt(item), add_special_tokens=False).ids for item in items]


def divergence(a: list[int], b: list[int]) -> int | None:
    """Return the first position where two answers differ, or None."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return resolve_checkpoint(Config(), Catalog.discover()).path


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cuda", max_total_tokens=MAX_TOTAL_TOKENS) as made:
        yield made


def test_first_divergence_from_transformers_is_in_both_top_fives(
    llm: LLM, checkpoint: Path
) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).cuda().eval()
    num_equal = 0
    for output in generate(llm, logprobs=TOP):
        ours, ids = output.outputs[0], output.prompt_token_ids
        with torch.inference_mode():
            logits = reference(torch.tensor([ids + ours.token_ids], device="cuda")).logits[
                0, len(ids) - 1 : -1
            ]
        theirs = logits.argmax(-1).tolist()
        at = next(
            (i for i, (a, b) in enumerate(zip(ours.token_ids, theirs, strict=True)) if a != b), None
        )
        if at is None:
            num_equal += 1
            continue
        assert ours.logprobs is not None
        assert ours.token_ids[at] in logits[at].topk(TOP).indices.tolist()
        assert theirs[at] in ours.logprobs[at]
    assert num_equal >= len(PROMPTS) // 2, "most sequences should not diverge at all"


def check_divergence(
    answers: list[RequestOutput], others: list[RequestOutput], min_equal: float = 0.9
) -> None:
    """Require a share of equal answers. The others must diverge within the top five of both."""
    num_equal = 0
    for one, other in zip(answers, others, strict=True):
        (ours,), (theirs,) = one.outputs, other.outputs
        assert ours.logprobs is not None
        assert theirs.logprobs is not None
        at = divergence(ours.token_ids, theirs.token_ids)
        if at is None:
            num_equal += 1
        else:
            assert ours.token_ids[at] in theirs.logprobs[at]
            assert theirs.token_ids[at] in ours.logprobs[at]
    assert num_equal >= int(len(answers) * min_equal), f"{num_equal} of {len(answers)} are equal"


def test_batching_diverges_only_within_both_top_fives(llm: LLM, checkpoint: Path) -> None:
    prompts = chats(checkpoint)
    first = generate(llm, prompts, logprobs=TOP, ignore_eos=False)
    again = generate(llm, prompts, logprobs=TOP, ignore_eos=False)
    assert any(output.num_cached_tokens for output in again), (
        "the second run should hit the prefix cache"
    )
    check_divergence(first, again)
    alone = [generate(llm, [prompt], logprobs=TOP, ignore_eos=False)[0] for prompt in prompts]
    check_divergence(first, alone)  # other kernels run for one row and for up to 64
    settings: dict[str, Any] = {"enforce_eager": True, "chunked_prefill_size": 16}
    with LLM(device="cuda", max_total_tokens=MAX_TOTAL_TOKENS, **settings) as eager:
        check_divergence(first, generate(eager, prompts, logprobs=TOP, ignore_eos=False))


def test_eager_steps_diverge_only_within_both_top_fives(llm: LLM, checkpoint: Path) -> None:
    prompts = chats(checkpoint, 24)
    llm.reset_prefix_cache()
    large = generate(llm, prompts, logprobs=TOP, ignore_eos=False)
    computed = sum(len(each.prompt_token_ids) - each.num_cached_tokens for each in large)
    assert computed > 1024 + 2 * 8192, "two large steps"
    settings: dict[str, Any] = {"chunked_prefill_size": 1024}
    with LLM(device="cuda", max_total_tokens=MAX_TOTAL_TOKENS, **settings) as small:
        check_divergence(large, generate(small, prompts, logprobs=TOP, ignore_eos=False))


def test_second_engine_finds_memory_freed_by_first() -> None:
    made = []
    for _ in range(2):
        with LLM(device="cuda", gpu_memory_utilization=0.5) as engine:
            assert engine.generate("7 + 8 =", SamplingParams(max_tokens=2))[0].outputs[0].token_ids
            made.append(engine)  # a notebook keeps a reference, too


def test_shared_prefix_diverges_only_within_both_top_fives(
    checkpoint: Path,
) -> None:
    own = chats(checkpoint)
    shared = [token for ids in own[:20] for token in ids][:512]
    prompts = [shared + ids for ids in own]
    answers = []
    for is_shared in (True, False):
        options = {"triton.shared_prefix": is_shared}
        with LLM(
            device="cuda",
            max_total_tokens=MAX_TOTAL_TOKENS,
            attention_backend="triton",
            backend_option=options,
        ) as made:
            answers.append(generate(made, prompts, logprobs=TOP))
    check_divergence(answers[0], answers[1], min_equal=0.5)


def test_batching_does_not_increase_the_float32_error(llm: LLM, checkpoint: Path) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).cuda().eval()

    def log_probabilities(output: RequestOutput) -> torch.Tensor:
        ids = output.prompt_token_ids
        with torch.inference_mode():
            logits = reference(
                torch.tensor([ids + output.outputs[0].token_ids], device="cuda")
            ).logits
        return logits[0, len(ids) - 1 : -1].log_softmax(-1)

    errors: dict[str, list[float]] = {"together": [], "alone": []}
    for together in generate(llm, logprobs=0):
        alone = generate(llm, [together.prompt_token_ids], logprobs=0)[0]
        at = divergence(together.outputs[0].token_ids, alone.outputs[0].token_ids)
        for name, output in (("together", together), ("alone", alone)):
            (answer,), exact = output.outputs, log_probabilities(output)
            assert answer.logprobs is not None
            for i, token in enumerate(answer.token_ids[:at]):
                errors[name].append(abs(answer.logprobs[i][token].logprob - float(exact[i, token])))
            if at is not None:
                # Within two bfloat16 steps of the best logit.
                assert float(exact[at].max() - exact[at, answer.token_ids[at]]) < 0.125
    assert statistics.mean(errors["alone"]) < 1.25 * statistics.mean(errors["together"]) < 0.02
