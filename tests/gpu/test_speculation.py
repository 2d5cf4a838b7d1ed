"""Outputs on a CUDA device do not depend on draft tokens, in captured and in eager steps."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenspeed_testing.attention import Rows, compare, limits_of, make_fixture, run
from tokenspeed_testing.requests import request

from tokenspeed_core.api.attention import AttentionProblem
from tokenspeed_core.config import Config
from tokenspeed_core.engine.factory import resolve
from tokenspeed_core.engine.messages import Submit
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.worker.local import LocalRunner, build
from tokenspeed_core.worker.staged import BucketSize
from tokenspeed_kernels.triton.attention.backend import TritonAttention

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))  # helper modules

from drafted import Guesser, Reply, finish, make_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB, MAX_DRAFTS = 1000, 8
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "torch_dtype": "float32",
}
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.0, "seed": 4, "top_k": 20, "top_p": 0.9, "n": 2},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"min_tokens": 7, "stop_token_ids": np.arange(0, VOCAB, 2, dtype=np.int32)},
    {"logprobs": 3},
)


def requests(kinds: tuple[dict[str, Any], ...]) -> list[Submit]:
    """Return three requests of each kind, some of which share a prefix of several blocks."""
    random = np.random.default_rng(0)
    shared, made, number = random.integers(0, VOCAB, 400).tolist(), [], 0
    for i, kind in enumerate(3 * kinds):
        tail = random.integers(0, VOCAB, int(random.integers(1, 30))).tolist()
        made.append(
            request(number, (shared if i % 3 else []) + tail, **{"max_tokens": 24 + i, **kind})
        )
        number += kind.get("n", 1)
    return made


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LocalRunner]:
    catalog = Catalog.discover()
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(SHAPE))

    def made(**settings: Any) -> LocalRunner:
        config = Config.from_keywords(
            model=str(folder),
            device="cuda",
            load_format="dummy",
            max_num_seqs=20,
            chunked_prefill_size=512,
            max_total_tokens=32768,
            block_size=16,
            speculative_algorithm="ngram",
            speculative_num_draft_tokens=1 + MAX_DRAFTS,
            **settings,
        )
        runner = build(resolve(config, catalog), catalog, lambda what, done, total: None)
        for slot in runner._model.weight_map():  # type: ignore[attr-defined]
            if slot.kind != "norm":
                slot.target.mul_(6.0)  # so that each token depends on all earlier ones
        return runner

    return made


@pytest.fixture(scope="module")
def captured(make: Callable[..., LocalRunner]) -> Iterator[LocalRunner]:
    runner = make()
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def eager(make: Callable[..., LocalRunner]) -> Iterator[LocalRunner]:
    runner = make(enforce_eager=True)
    yield runner
    runner.close()


def known(made: list[Submit], replies: dict[int, Reply]) -> list[list[int]]:
    """Return the prompts and outputs of all sequences."""
    return [
        [*submit.prompt.tolist(), *replies[submit.request_id + i].token_ids]
        for submit in made
        for i in range(submit.n)
    ]


@pytest.mark.parametrize("is_captured", [True, False])
@pytest.mark.parametrize("kinds", [KINDS[:1], KINDS[1:3], KINDS], ids=["greedy", "seeded", "all"])
@pytest.mark.parametrize("wrong", [0.0, 0.3])
def test_drafts_change_no_token(
    request: pytest.FixtureRequest,
    is_captured: bool,
    kinds: tuple[dict[str, Any], ...],
    wrong: float,
) -> None:
    runner: LocalRunner = request.getfixturevalue("captured" if is_captured else "eager")
    made = requests(kinds)
    expected = finish(make_engine(runner), made)
    assert max(len(set(reply.token_ids)) for reply in expected.values()) > 5
    drafter = Guesser(VOCAB, wrong)
    drafter.known = known(made, expected)
    used: list[BucketSize | None] = []
    if runner._graphs is not None:
        finder = runner._graphs._finder
        find = finder._with_drafts
        finder._with_drafts = lambda *step: used.append(find(*step)) or used[-1]  # type: ignore[method-assign, func-returns-value]
    engine = make_engine(runner, drafter, max_drafts=MAX_DRAFTS, depth=2)
    found = finish(engine, made)
    if runner._graphs is not None:
        del finder._with_drafts  # type: ignore[method-assign]
        assert len(set(used)) >= 2
        assert None not in used
    for number, reply in expected.items():
        assert (found[number].token_ids, found[number].finish) == (reply.token_ids, reply.finish)
        assert found[number].logprobs == reply.logprobs
    stats = engine.scheduler.counters.snapshot(engine.scheduler.kv, 0)
    assert stats.num_saved_steps > 10
    assert int(runner._state.seq_len[runner._state.layout.padding_slot]) == 0


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(("num_heads", "window"), [(2, None), (8, None), (8, 100), (16, None)])
def test_attention_of_drafts_matches_the_formula(
    num_heads: int, window: int | None, kv_dtype: str
) -> None:
    """Tiles of 16, 64 and 128 rows; split and whole keys; padding rows and tokens, as in a captured step."""
    device = torch.device("cuda")
    problem = AttentionProblem(
        "decode", num_heads, 2, 128, "bfloat16", kv_dtype, 16, 128**-0.5, window
    )
    for rows in (
        Rows((9,), (1030,)),
        Rows((9, 1, 3, 5, 0, 0), (2301, 40, 3, 700, 0, 0)),
        Rows((9, 2) * 96, (300, 77) * 96),
    ):
        fixture = make_fixture(problem, rows, device, seed=0)
        count = fixture.step.num_tokens
        step = replace(
            fixture.step,
            num_tokens=count + 3,
            max_seq_len=4096,
            host_query_start=None,
            host_seq_lens=None,
        )
        limits = replace(limits_of(fixture), max_model_len=4096)
        kernel = TritonAttention(problem, limits, device)
        kernel.prepare(step)
        q = torch.cat((fixture.q, torch.full_like(fixture.q[:3], float("nan"))))
        for _ in range(2):
            out = torch.full(q.shape, float("nan"), dtype=q.dtype, device=device)
            run(kernel, replace(fixture, q=q), out)
            compare(f"{rows}", problem, out[:count], fixture.expected)


def test_launching_a_step_with_drafts_does_not_synchronize(captured: LocalRunner) -> None:
    made = requests(KINDS[:2])
    drafter = Guesser(VOCAB, 0.3)
    drafter.known = known(made, finish(make_engine(captured), made))
    engine = make_engine(captured, drafter, max_drafts=MAX_DRAFTS)
    sample = captured.sample

    def checked(*arguments: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            sample(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured, "sample", checked)
        finish(engine, made)
    assert engine.scheduler.counters.snapshot(engine.scheduler.kv, 0).num_saved_steps
