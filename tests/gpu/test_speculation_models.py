"""Draft models on a CUDA device give the outputs of steps without draft tokens, captured in CUDA graphs and eagerly.

Up to rounding, which may change a choice between almost equal logits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenspeed_demo.items import NUM_HELD_OUT, held_out_set
from tokenspeed_demo.render import TEMPLATE, Renderer
from tokenspeed_testing.requests import request

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.config import Config
from tokenspeed_core.engine.factory import resolve
from tokenspeed_core.engine.messages import Submit
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.worker.local import LocalRunner, build
from tokenspeed_core.worker.staged import BucketSize

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))  # helper modules

from drafted import Reply, finish, make_engine
from score_answers import DRAFTERS, answers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIN_EQUAL = 0.95
MTP = {"method": "mtp", "num_speculative_tokens": 3}
EAGLE3 = {"method": "eagle3", "model": "demo-eagle3", "num_speculative_tokens": 5}
ITSELF = {"method": "draft_model", "model": "demo", "num_speculative_tokens": 3}
DEEPSEEK = {"method": "draft_model", "model": "demo-deepseek", "num_speculative_tokens": 2}
# The model, its drafter, and the least share of accepted first draft tokens.
CASES: dict[str, tuple[str, dict[str, Any], float]] = {
    "mtp": ("demo-deepseek", MTP, 0.8),
    "eagle3": ("demo", EAGLE3, 0.75),
    "itself": ("demo", ITSELF, 0.97),
    "other_model": ("demo", DEEPSEEK, 0.8),
}
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 3},
    {},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"temperature": 1.0, "seed": 4, "top_k": 20, "top_p": 0.9, "n": 2},
    {"logprobs": 3},
    {"min_tokens": 7, "stop_token_ids": np.arange(0, 1536, 7, dtype=np.int32)},
)


def prompts(num_items: int) -> list[list[int]]:
    tokenizer, renderer = Tokenizer.from_file(str(TEMPLATE.parent / "tokenizer.json")), Renderer()
    return [
        tokenizer.encode(renderer.prompt(item), add_special_tokens=False).ids
        for task in ("edit", "copy", "tool_call", "sum_three_digits")
        for item in held_out_set(task, num_items)
    ]


def requests() -> list[Submit]:
    made, number = [], 0
    for i, prompt in enumerate(prompts(9)):
        kind = KINDS[i % len(KINDS)]
        made.append(request(number, prompt, **{"max_tokens": 24 + i, **kind}))
        number += kind.get("n", 1)
    return made


@pytest.fixture(scope="module")
def make() -> Iterator[Callable[..., LocalRunner]]:
    catalog, runners = Catalog.discover(), {}

    def made(name: str, *, is_captured: bool) -> LocalRunner:
        if (name, is_captured) not in runners:
            model, drafter, _ = CASES[name]
            config = Config.from_keywords(
                model=model,
                device="cuda",
                dtype="float32",
                max_num_seqs=16,
                chunked_prefill_size=256,
                max_total_tokens=16384,
                cudagraph_capture_sizes=None if not is_captured else (1, 4, 16),
                enforce_eager=not is_captured,
                speculative_config=drafter,
            )
            runners[name, is_captured] = build(
                resolve(config, catalog), catalog, lambda what, done, total: None
            )
        return runners[name, is_captured]

    yield made
    for runner in runners.values():
        runner.close()


def note_sizes(runner: LocalRunner, patch: pytest.MonkeyPatch) -> list[BucketSize]:
    """Return a list that receives the size of each captured step with draft tokens or their model."""
    used: list[BucketSize] = []
    if runner._graphs is not None:
        upload = runner._graphs._upload

        def note(bucket: Any, plan: Any) -> bytes:
            if plan.next_drafts is not None:
                used.append(bucket.layout.size)
            return upload(bucket, plan)

        patch.setattr(runner._graphs, "_upload", note)
    return used


def num_equal(found: dict[int, Reply], expected: dict[int, Reply]) -> int:
    return sum(
        (found[number].token_ids, found[number].finish) == (reply.token_ids, reply.finish)
        for number, reply in expected.items()
    )


@pytest.mark.parametrize("is_captured", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("name", list(CASES))
def test_draft_model_changes_no_output(
    make: Callable[..., LocalRunner],
    name: str,
    is_captured: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, (_, drafter, least) = make(name, is_captured=is_captured), CASES[name]
    expected = finish(make_engine(runner), requests())
    used = note_sizes(runner, monkeypatch)
    engine = make_engine(
        runner,
        max_drafts=drafter["num_speculative_tokens"],
        depth=2,
        with_prompts=not is_captured,
    )
    found = finish(engine, requests(), preempt_every=25)
    stats = engine.stats()
    share = stats.num_accepted[0] / stats.num_draft_rows
    per_step = 1 + stats.num_saved_steps / stats.num_draft_rows
    equal = num_equal(found, expected)
    print(
        f"{name}: {equal} of {len(expected)} equal, {per_step:.2f} tokens a step, first {share:.3f}, "
        f"{len(used)} captured steps of {len(set(used))} sizes"
    )
    assert equal >= MIN_EQUAL * len(expected)
    assert share >= least
    assert bool(used) == is_captured
    if is_captured:
        assert len(set(used)) >= 2
    counts = engine.scheduler.kv.pool.counts()
    assert (counts.held, counts.pending) == (0, 0)
    assert int(runner._state.seq_len[runner._state.layout.padding_slot]) == 0


def test_captured_draft_passes_do_not_synchronize(make: Callable[..., LocalRunner]) -> None:
    runner = make("eagle3", is_captured=True)
    sample, num_checked = runner.sample, 0

    def checked(step_id: int, late: Any) -> None:
        nonlocal num_checked
        graph = runner._launched[step_id].graph
        is_checked = graph is not None and graph.follow is not None
        num_checked += is_checked
        torch.cuda.set_sync_debug_mode("error" if is_checked else "default")
        try:
            sample(step_id, late)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "sample", checked)
        finish(make_engine(runner, max_drafts=5, depth=2), requests()[:4])
    assert num_checked > 5


@pytest.fixture(scope="module")
def expected_answers() -> Callable[[str], list[list[int]]]:
    """Return a function from a model to its answers to the score set without a drafter."""

    @cache
    def of(model: str) -> list[list[int]]:
        with pytest.MonkeyPatch.context() as patch:
            return answers(model, NUM_HELD_OUT, patch, device="cuda", max_num_seqs=64)[0]

    return of


@pytest.mark.release
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", list(DRAFTERS))
def test_drafter_changes_no_answer_of_the_score_set(
    name: str,
    expected_answers: Callable[[str], list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, drafter = DRAFTERS[name]
    expected = expected_answers(model)
    found, stats = answers(
        model,
        NUM_HELD_OUT,
        monkeypatch,
        device="cuda",
        max_num_seqs=64,
        speculative_config=drafter,
    )
    equal = sum(map(list.__eq__, found, expected))
    per_step = 1 + stats.num_saved_steps / stats.num_draft_rows
    print(f"{name}: {equal} of {len(expected)} equal, {per_step:.2f} tokens a step")
    assert equal >= 0.99 * len(expected)
    assert stats.num_held_pages == 0


@pytest.mark.parametrize("name", ["mtp", "eagle3"])
def test_depth_follows_the_measured_times(name: str) -> None:
    model, drafter, _ = CASES[name]
    answers, stats = [], None
    for settings in ({}, {"speculative_config": drafter}):
        with LLM(
            model=model,
            dtype="float32",
            device="cuda",
            max_num_seqs=2,  # about 800 steps. Drafts are tried after FIRST_PAUSE steps.
            chunked_prefill_size=256,
            max_total_tokens=16384,
            **settings,  # type: ignore[arg-type]
        ) as llm:
            outputs = llm.generate(
                [{"prompt_token_ids": ids} for ids in prompts(12)],
                SamplingParams(temperature=0, max_tokens=160),
                use_tqdm=False,
            )
            answers.append([list(each.outputs[0].token_ids) for each in outputs])
            stats = llm.stats()
    equal = sum(map(list.__eq__, *answers))
    assert stats is not None
    print(
        f"{name}: {equal} of {len(answers[0])} equal, {stats.num_draft_rows} rows with draft tokens"
    )
    assert stats.num_draft_rows
    assert equal >= MIN_EQUAL * len(answers[0])
    assert stats.num_held_pages == 0
