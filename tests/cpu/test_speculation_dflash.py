"""DFlash drafters: their blocks equal the published architecture, and outputs do not depend on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dflash_reference import PUBLISHED, TARGET, Reference
from draft_grammars import (
    BACKENDS,
    characters,
    grammar_backend,
    grammar_requests,
    grammars_of,
    num_matches,
    soaks,
)
from draft_requests import check, check_with_settings, engine_settings, few_examples
from drafted import (
    Reply,
    check_starts,
    draft_in_every_step,
    finish,
    make_engine,
    random_requests,
    soak,
)
from host_graphs import capture_decodes
from hypothesis import given
from tiny_families import save_reference
from tokenspeed_testing.requests import request

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.config import Config
from tokenspeed_core.engine.engine import Engine
from tokenspeed_core.engine.factory import resolve
from tokenspeed_core.engine.messages import Submit
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.worker.draft_model import DraftRunner, TargetStep
from tokenspeed_core.worker.local import LocalRunner, build

VOCAB = PUBLISHED["vocab_size"]
NUM_DRAFTS = PUBLISHED["block_size"] - 1
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.0, "seed": 4, "top_k": 5, "top_p": 0.9, "n": 2},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"min_tokens": 7, "stop_token_ids": np.arange(0, VOCAB, 5, dtype=np.int32)},
    {"stop_token_ids": np.asarray([3], np.int32)},
    {"logprobs": 3, "prompt_logprobs": 2},
)


def requests(seed: int = 0) -> list[Submit]:
    """Return a request of each kind, some of which share a long prefix."""
    random = np.random.default_rng(seed)
    shared, made, number = random.integers(0, VOCAB, 40).tolist(), [], 0
    for i, kind in enumerate(KINDS):
        tail = random.integers(0, VOCAB, int(random.integers(1, 12))).tolist()
        prompt = (shared if i % 3 else []) + tail
        made.append(request(number, prompt, **{"max_tokens": 9 + 5 * i % 13, **kind}))
        number += kind.get("n", 1)
    return made


@dataclass(frozen=True)
class Models:
    target: Any  # of transformers
    drafter: Reference
    folder: Path  # of the target
    draft_folder: Path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder, draft_folder = (tmp_path_factory.mktemp(name) for name in ("target", "dflash"))
    target, drafter = save_reference("Qwen3", folder, **TARGET), Reference()
    drafter.save(draft_folder)
    return Models(target, drafter, folder, draft_folder)


def start(models: Models, catalog: Catalog, **flags: Any) -> LocalRunner:
    config = Config.from_keywords(
        **{
            "model": str(models.folder),
            "device": "cpu",
            "dtype": "float32",
            "max_num_seqs": 6,
            "block_size": 8,
            "max_total_tokens": 1024,
            "chunked_prefill_size": 256,
            "speculative_config": {"method": "dflash", "model": str(models.draft_folder)},
            **flags,
        }
    )
    return build(resolve(config, catalog), catalog, lambda what, done, total: None)


@pytest.fixture(scope="module")
def runner(models: Models, catalog: Catalog) -> LocalRunner:
    return start(models, catalog)


@pytest.fixture(scope="module")
def expected(runner: LocalRunner) -> dict[int, Reply]:
    return finish(make_engine(runner), requests())


@dataclass
class Blocks:
    """The draft tokens that were made after a number of tokens of a sequence, by sequence."""

    found: dict[int, list[tuple[int, list[int], torch.Tensor]]] = field(default_factory=dict)

    def watch(self, engine: Engine, runner: LocalRunner, patch: pytest.MonkeyPatch) -> None:
        """Note the draft tokens and the hidden states of each pass."""
        hidden: list[torch.Tensor] = []
        found = self.found
        drafter, follow = runner._drafter, DraftRunner.follow
        assert drafter is not None and drafter._block_model is not None
        forward = drafter._block_model.forward_block

        def note_hidden(token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            hidden.append(forward(token_ids, positions))
            return hidden[-1].clone()

        def note(
            self: DraftRunner,
            step: TargetStep,
            ids: torch.Tensor | None,
            num_new: torch.Tensor | None,
        ) -> torch.Tensor | None:
            hidden.clear()
            result = follow(self, step, ids, num_new)
            if not hidden:
                return result
            slots = step.plan.slots[step.plan.wants_logits].tolist()
            blocks = hidden[0].unflatten(0, (len(slots), -1))
            state = runner._state
            for slot, states in zip(slots, blocks, strict=True):
                number = int(engine.scheduler.columns.sequence_id[slot])
                drafts = state.drafts[slot].tolist()
                made = (int(state.seq_len[slot]), drafts, states)
                found.setdefault(number, []).append(made)
            return result

        patch.setattr(drafter._block_model, "forward_block", note_hidden)
        patch.setattr(DraftRunner, "follow", note)


def check_blocks(models: Models, blocks: Blocks, sequences: Sequence[list[int]]) -> int:
    """Compare the blocks with those of the reference. Returns the number of those compared."""
    num_compared = 0
    for number, token_ids in enumerate(sequences):
        for num_known, drafts, states in blocks.found[number]:
            if num_known + 1 + NUM_DRAFTS > len(
                token_ids
            ):  # its blocks have no room for all drafts
                continue
            hidden, ids = models.drafter.block(
                models.target, token_ids[: num_known + 1], NUM_DRAFTS
            )
            torch.testing.assert_close(states, hidden, rtol=1e-3, atol=1e-3)
            assert drafts == ids.tolist()
            num_compared += 1
    return num_compared


def compare_blocks(
    models: Models, runner: LocalRunner, patch: pytest.MonkeyPatch, **limits: Any
) -> Engine:
    """Run requests with a shared prefix, and compare their blocks with the reference. Returns the engine."""
    random = np.random.default_rng(3)
    shared = random.integers(0, VOCAB, 24).tolist()
    prompts = [shared + random.integers(0, VOCAB, num).tolist() for num in (5, 1, 9)]
    engine = make_engine(runner, max_drafts=NUM_DRAFTS, **limits)
    blocks = Blocks()
    blocks.watch(engine, runner, patch)
    replies = finish(engine, [request(i, each, max_tokens=30) for i, each in enumerate(prompts)])
    sequences = [[*prompt, *replies[i].token_ids] for i, prompt in enumerate(prompts)]
    assert check_blocks(models, blocks, sequences) > 15
    return engine


@pytest.mark.parametrize("chunk", [-1, 11])
def test_blocks_equal_the_published_architecture(
    models: Models, runner: LocalRunner, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a prefix hit, in chunks, and after steps that accepted some of the draft tokens."""
    engine = compare_blocks(models, runner, monkeypatch, chunk_size=chunk, max_prefill_tokens=256)
    assert len(runner.resolved.cache_groups) == 1
    stats = engine.stats()
    accepted = stats.num_accepted
    assert accepted[0] > accepted[2] > accepted[-1] > 0, "some steps accept a part of a block"
    assert stats.num_prefix_hits > 0


def test_drafter_with_other_heads_has_its_own_cache_group(
    models: Models, catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**PUBLISHED, "num_key_value_heads": 1, "head_dim": 32, "attention_bias": True}
    other = replace(models, drafter=Reference(config), draft_folder=tmp_path)
    other.drafter.save(tmp_path, config)
    runner = start(other, catalog)
    assert len(runner.resolved.cache_groups) == 2
    compare_blocks(other, runner, monkeypatch)


@few_examples(3)
@given(chosen=engine_settings(NUM_DRAFTS, [-1, 13, 32], 30))
def test_drafter_changes_no_output(
    runner: LocalRunner, expected: dict[int, Reply], chosen: dict[str, Any]
) -> None:
    check_with_settings(runner, requests(), expected, chosen, min_accepted=0.2)


def test_captured_drafter_changes_no_output(
    runner: LocalRunner, expected: dict[int, Reply], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(runner, max_drafts=NUM_DRAFTS, depth=2, chunk_size=32)
    finish(engine, requests(), preempt_every=9)
    eager = engine.stats()
    used = capture_decodes(runner, (1, 2, 6), monkeypatch, with_prompts=True)
    engine = make_engine(runner, max_drafts=NUM_DRAFTS, depth=2, chunk_size=32)
    check(finish(engine, requests(), preempt_every=9), expected)
    stats = engine.stats()
    # Rounding may change a draft token.
    assert stats.num_draft_tokens == pytest.approx(eager.num_draft_tokens, rel=0.05)
    assert sum(stats.num_accepted) == pytest.approx(sum(eager.num_accepted), rel=0.05)
    assert len({size for size in used if size.num_draft_tokens}) >= 2
    assert any(size.num_chunks for size in used)


def test_logits_in_parts_give_the_same_drafts(
    runner: LocalRunner, expected: dict[int, Reply], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> Any:
        engine = make_engine(runner, max_drafts=NUM_DRAFTS)
        check(finish(engine, requests()), expected)
        return engine.stats()

    whole = run()
    monkeypatch.setattr("tokenspeed_core.worker.block_pass._MAX_LOGITS", 2)
    parts = run()
    assert parts.num_accepted == whole.num_accepted


@soaks(BACKENDS[0], 30)
@pytest.mark.timeout(1800)
def test_blocks_are_free_after_requests_with_aborts(
    runner: LocalRunner, catalog: Catalog, grammars: str, num_requests: int
) -> None:
    backend = grammar_backend(grammars, catalog, runner, characters(VOCAB, "a"))
    with_grammar = grammar_requests(backend, [[0, 1, 2, i] for i in range(5)])
    made = random_requests([*requests(), *with_grammar], num_requests)
    plain = finish(make_engine(runner, grammars=grammars_of(backend)), made[:30])
    engine = make_engine(
        runner, max_drafts=NUM_DRAFTS, num_pages=60, depth=2, grammars=grammars_of(backend)
    )
    replies = soak(engine, made)
    check_starts(replies[:30], plain)
    assert num_matches(backend, replies) > 0.05 * num_requests
    assert engine.stats().num_saved_steps > 0.1 * num_requests


@pytest.mark.parametrize(
    "processes",
    [
        pytest.param({}, id="one"),
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.release),
    ],
)
def test_settings_of_a_user(
    models: Models, processes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, a drafter makes whole blocks. Greedy answers take fewer steps, also if processes share the model."""
    draft_in_every_step(monkeypatch)
    drafter = {
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": str(models.draft_folder),
        "speculative_eagle_topk": 1,
    }
    prompts = [{"prompt_token_ids": submit.prompt.tolist()} for submit in requests()]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    answers = []
    for flags in ({}, {**drafter, **processes}):
        with LLM(
            model=str(models.folder),
            device="cpu",
            dtype="float32",
            skip_tokenizer_init=True,
            max_num_seqs=6,
            max_total_tokens=2048,
            **flags,  # type: ignore[arg-type]
        ) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers.append([list(output.outputs[0].token_ids) for output in outputs])
            stats = llm.stats()
    assert answers[0] == answers[1]
    assert len(stats.num_accepted) == NUM_DRAFTS
    assert 1 + stats.num_saved_steps / stats.num_draft_rows > 1.5, "tokens per step"
